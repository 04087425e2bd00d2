"""Bytes and cache declarations of one layer on one rank, from the dimensions alone, as the layers themselves have them.

Arithmetic only: must not import torch. A test holds it against the models that are built.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.decoder import DecoderConfig
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)


@dataclass(frozen=True)
class LayerShape:
    """A layer's part of one rank.

    Attributes:
        decoder: dimensions.
        ranks: tensor-parallel size.
        kv_heads: KV heads on this rank.
        element_bytes: of activations.
        cache_element_bytes: of the KV cache.
        int8: linears have one byte an element, and 12 bytes a row.
    """

    decoder: DecoderConfig
    ranks: int
    kv_heads: int
    element_bytes: int
    cache_element_bytes: int
    int8: bool

    def linear(self, rows: int, columns: int, bias: bool = False) -> int:
        """Bytes of a linear, which int8 rounds."""
        matrix = rows * columns + 12 * rows if self.int8 else rows * columns * self.element_bytes
        return matrix + (rows * self.element_bytes if bias else 0)

    def exact(self, rows: int, columns: int) -> int:
        """Bytes of a linear that is never rounded."""
        return rows * columns * self.element_bytes

    @property
    def norm_bytes(self) -> int:
        """Bytes of one element of a norm's weight."""
        return 4 if self.decoder.norm_offset else self.element_bytes

    def layer(self, index: int) -> int:
        """Bytes of the parameters of a layer."""
        decoder, kind = self.decoder, self.decoder.layers[index]
        norms = (4 if decoder.norms_after else 2) * decoder.hidden_size * self.norm_bytes
        mixer = self._delta() if kind.mixer == "recurrent" else self._attention()
        mlp = self._experts() if kind.experts else self._mlp(decoder.intermediate_size)
        return norms + mixer + mlp

    def idle(self, index: int) -> int:
        """Bytes of a layer that one token does not read: the experts that are not chosen for it."""
        experts = self.decoder.experts
        if experts is None or not self.decoder.layers[index].experts:
            return 0
        return (experts.count - experts.top_k) * self._mlp(experts.intermediate_size)

    def cache(self, index: int) -> CacheSpec:
        """Return what a layer keeps."""
        decoder, kind = self.decoder, self.decoder.layers[index]
        shape = (self.kv_heads, decoder.head_dim, decoder.head_dim, self.cache_element_bytes)
        if kind.mixer == "sliding":
            return SlidingWindowSpec(*shape, decoder.window_tokens)
        if kind.mixer == "chunked":
            return ChunkedLocalSpec(*shape, decoder.chunk_tokens)
        delta = decoder.delta
        if kind.mixer == "full" or delta is None:
            return FullAttentionSpec(*shape)
        channels = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
        tail = StatePart("conv", (delta.conv_tokens - 1, channels // self.ranks), self.element_bytes)
        state = StatePart("state", (delta.value_heads // self.ranks, delta.key_dim, delta.value_dim), 4)
        return RecurrentSpec((tail, state))

    def _attention(self) -> int:
        decoder = self.decoder
        dim, heads = decoder.head_dim, decoder.num_heads // self.ranks
        queries = 2 * heads if decoder.attention_gate else heads
        norms = 2 * dim * self.norm_bytes if decoder.qk_norm else 0
        return (
            self.linear((queries + 2 * self.kv_heads) * dim, decoder.hidden_size, decoder.attention_bias)
            + self.linear(decoder.hidden_size, heads * dim, decoder.output_bias)
            + norms
        )

    def _delta(self) -> int:
        decoder, delta = self.decoder, self.decoder.delta
        if delta is None:
            return 0
        keys, values = delta.key_heads * delta.key_dim // self.ranks, delta.value_heads * delta.value_dim // self.ranks
        heads = delta.value_heads // self.ranks
        return (
            self.linear(2 * keys + 2 * values, decoder.hidden_size)
            + self.exact(2 * heads, decoder.hidden_size)
            + self.linear(decoder.hidden_size, values)
            + delta.conv_tokens * (2 * keys + values) * self.element_bytes
            + (2 * heads + delta.value_dim) * 4
        )

    def _mlp(self, inner: int) -> int:
        decoder, inner = self.decoder, inner // self.ranks
        return self.linear(2 * inner, decoder.hidden_size, decoder.mlp_bias) + self.linear(
            decoder.hidden_size, inner, decoder.mlp_bias
        )

    def _experts(self) -> int:
        experts, hidden = self.decoder.experts, self.decoder.hidden_size
        if experts is None:
            return 0
        gate = self.exact(1, hidden) if experts.shared_gate else 0
        routed = experts.count * self._mlp(experts.intermediate_size)
        return self.exact(experts.count, hidden) + gate + self._mlp(experts.shared_intermediate_size) + routed

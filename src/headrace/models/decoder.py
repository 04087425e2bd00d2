"""The dense decoder that the model files share: embedding, layers, norm, head.

Must not know an architecture's name: a family says in `make_layer` what its layers are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from headrace.attention.contract import LayerKv
from headrace.base.errors import WeightLoadError
from headrace.config.decoder import DecoderConfig
from headrace.layers.attention import Attention
from headrace.layers.context import ModelContext
from headrace.layers.embedding import OutputHead, TokenEmbedding, VocabTable
from headrace.layers.kernels import check_context
from headrace.layers.linear import Targets
from headrace.layers.mlp import GatedMlp
from headrace.layers.norm import RmsNorm
from headrace.ops.rope.eager import RopeTable
from headrace.ops.rope.frequencies import inverse_frequencies
from headrace.types.cache_specs import LayerCache


class DecoderLayer:
    """Pre-norm layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        context: where it runs.
        decoder: dimensions.
        attention: attention block.
        mlp: MLP block.
    """

    def __init__(self, context: ModelContext, decoder: DecoderConfig, attention: Attention, mlp: GatedMlp) -> None:
        self.attention_norm = RmsNorm(context, decoder.hidden_size, decoder.rms_eps)
        self.attention = attention
        self.mlp_norm = RmsNorm(context, decoder.hidden_size, decoder.rms_eps)
        self.mlp = mlp

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        norms = self.attention_norm.held_bytes + self.mlp_norm.held_bytes
        return norms + self.attention.held_bytes + self.mlp.held_bytes

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix ("model.layers.0.")."""
        return {
            **self.attention_norm.targets(prefix + "input_layernorm"),
            **self.attention.targets(prefix + "self_attn."),
            **self.mlp_norm.targets(prefix + "post_attention_layernorm"),
            **self.mlp.targets(prefix + "mlp."),
        }

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        for part in (self.attention_norm, self.attention, self.mlp_norm, self.mlp):
            part.finalize()

    def __call__(self, x: Tensor, cos: Tensor, signed_sin: Tensor, step: object) -> Tensor:
        """Return x with the layer's results added in place.

        Args:
            x: [T, H] residual stream.
            cos: [T, 1, D].
            signed_sin: [T, 1, D].
            step: of the attention backend.

        Mutates:
            ``x``, and the KV memory of the step's tokens.
        """
        x.add_(self.attention(self.attention_norm(x), cos, signed_sin, step))
        return x.add_(self.mlp(self.mlp_norm(x)))


class CausalModel(ABC):
    """A decoder with a language-model head.

    Args:
        decoder: dimensions.
        context: where it runs.

    Raises:
        ConfigError: the context cannot be served, or the dimensions do not split over the ranks.
    """

    def __init__(self, decoder: DecoderConfig, context: ModelContext) -> None:
        check_context(context)
        self.decoder = decoder
        self.context = context
        self._embedding = TokenEmbedding(context, decoder.vocab_size, decoder.hidden_size)
        self._layers = [self.make_layer(index) for index in range(decoder.num_layers)]
        self._norm = RmsNorm(context, decoder.hidden_size, decoder.rms_eps)
        own_table = None if decoder.tie_embeddings else VocabTable(context, decoder.vocab_size, decoder.hidden_size)
        self._own_table = own_table
        self._head = OutputHead(context, own_table or self._embedding.table, decoder.vocab_size)
        frequencies, factor = inverse_frequencies(
            decoder.ropes[0].theta, decoder.ropes[0].dim, decoder.ropes[0].scaling
        )
        self._rope = RopeTable(frequencies, factor, context.dtype, context.device)
        self._finalized = False

    @abstractmethod
    def make_layer(self, index: int) -> DecoderLayer:
        """Return layer ``index``; called while the model is built, with ``decoder`` and ``context`` set."""

    @property
    def ignorable_weights(self) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that may be there without being used."""
        return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if self.decoder.tie_embeddings else ()))

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the KV cache; the backend's memory must be allocated with it."""
        return self.context.cache_dtype

    def layer_caches(self) -> list[LayerCache]:
        """Declare what each layer keeps for its tokens, on this rank."""
        return [layer.attention.cache(self.cache_dtype.itemsize) for layer in self._layers]

    def weight_targets(self) -> Targets:
        """Return every tensor of the checkpoint by its Hugging Face name. Requires that `finalize` was not called.

        Raises:
            WeightLoadError: after `finalize`.
        """
        if self._finalized:
            raise WeightLoadError("the weights are packed already; build a new model to load others")
        targets = self._embedding.table.targets("model.embed_tokens")
        for index, layer in enumerate(self._layers):
            targets.update(layer.targets(f"model.layers.{index}."))
        targets.update(self._norm.targets("model.norm"))
        if self._own_table is not None:
            targets.update(self._own_table.targets("lm_head"))
        return targets

    def finalize(self) -> None:
        """Pack or quantise the loaded weights and free the originals. Call once, after loading."""
        for layer in self._layers:
            layer.finalize()
        self._norm.finalize()
        self._head.finalize(keep_table=self.decoder.tie_embeddings)
        self._finalized = True

    def bind_cache(self, kv: dict[int, LayerKv]) -> None:
        """Give each layer its KV memory.

        Args:
            kv: by layer index, from the backend's ``allocate``.
        """
        for layer in self._layers:
            layer.attention.bind_cache(kv[layer.attention.layer_index])

    def forward(self, token_ids: Tensor, positions: Tensor, step: Any) -> Tensor:
        """Compute the final hidden states of a step's tokens.

        Args:
            token_ids: [T] int64.
            positions: [T] int64.
            step: from the backend's ``prepare`` for the same tokens.

        Returns:
            [T, H], normalised.

        Mutates:
            the KV memory of these tokens.
        """
        cos, signed_sin = self._rope.rows(positions, step.longest_tokens)
        x = self._embedding(token_ids)
        for layer in self._layers:
            x = layer(x, cos, signed_sin, step)
        hidden = self._norm(x)
        self.context.attention.observe(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [R, vocabulary] for hidden [R, H]."""
        return self._head(hidden)

    def parameter_bytes(self) -> int:
        """Bytes of the parameters on this rank, as they are held now."""
        parts = [self._embedding.held_bytes, self._norm.held_bytes, self._head.held_bytes]
        own = 0 if self._own_table is None else self._own_table.weight.nbytes
        return sum(parts) + own + sum(layer.held_bytes for layer in self._layers)

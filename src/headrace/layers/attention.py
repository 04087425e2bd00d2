"""Attention block of a decoder layer: packed q, k, v; norms of the heads; rotation; attention; gate; output.

What a layer has of these follows from the dimensions and from its kind. Must not know an architecture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.arena import KvArena, LayerAttention
from headrace.attention.contract import Scoring
from headrace.attention.select import AttentionNeed
from headrace.attention.step import StepContext
from headrace.base.errors import ConfigError, InvariantError, invariant
from headrace.config.decoder import DecoderConfig, Temperature
from headrace.layers.context import ModelContext
from headrace.layers.linear import ColumnLinear, RowLinear, RowPart, Targets, ordered_part
from headrace.layers.norm import copy_shifted
from headrace.ops.activation.eager import sigmoid_mul
from headrace.ops.norm.eager import head_rms_norm, unit_rms_norm
from headrace.ops.rope.eager import rotate
from headrace.parallel.groups import TensorParallel
from headrace.types.cache_specs import ChunkedLocalSpec, FullAttentionSpec, LayerCache, SlidingWindowSpec
from headrace.weights.target import WeightTarget


def kv_share(kv_heads: int, tp: TensorParallel) -> tuple[int, int]:
    """Return (first KV head, KV heads) of a rank; with more ranks than heads, several ranks hold the same head.

    Args:
        kv_heads: of the whole model.
        tp: the ranks.

    Raises:
        ConfigError: neither number is a multiple of the other.
    """
    if kv_heads % tp.size == 0:
        count = kv_heads // tp.size
        return tp.rank * count, count
    if tp.size % kv_heads == 0:
        return tp.rank // (tp.size // kv_heads), 1
    raise ConfigError(
        f"{kv_heads} KV heads cannot be split over --tensor-parallel-size {tp.size}: "
        "neither is a multiple of the other",
        param="tensor_parallel_size",
    )


class HeadNorm:
    """RMS norm of each query and key head, before rotation.

    Args:
        context: where it runs.
        heads: query heads on this rank.
        kv_heads: KV heads on this rank.
        dim: of a head.
        eps: added to the mean square.
        offset: added to the stored weights; see `norm.RmsNorm`.
    """

    def __init__(
        self, context: ModelContext, heads: int, kv_heads: int, dim: int, eps: float, offset: float = 0.0
    ) -> None:
        dtype = torch.float32 if offset else context.dtype
        self._weight = torch.empty(heads + kv_heads, dim, dtype=dtype, device=context.device)
        self._heads, self._dim, self._eps, self._offset = heads, dim, eps, offset

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights."""
        return self._weight.nbytes

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        queries, keys = self._weight[: self._heads], self._weight[self._heads :]
        return {
            f"{prefix}q_norm.weight": WeightTarget((self._dim,), copy_shifted(queries, self._offset)),
            f"{prefix}k_norm.weight": WeightTarget((self._dim,), copy_shifted(keys, self._offset)),
        }

    def __call__(self, qk: Tensor) -> Tensor:
        """Return the norm of qk [T, heads + kv_heads, D]."""
        return head_rms_norm(qk.to(self._weight.dtype), self._weight, self._eps).to(qk.dtype)


class Attention:
    """Causal self-attention with grouped query heads.

    Args:
        context: where it runs.
        decoder: dimensions.
        layer_index: position in the model.
    """

    def __init__(self, context: ModelContext, decoder: DecoderConfig, layer_index: int) -> None:
        tp, dim = context.tp, decoder.head_dim
        self._heads = tp.share(decoder.num_heads, "attention heads")
        self._first_kv, self._kv_heads = kv_share(decoder.num_kv_heads, tp)
        self._decoder, self._dim = decoder, dim
        self._kind = decoder.layers[layer_index]
        self._attend: LayerAttention | None = None
        self._context = context
        self.layer_index = layer_index
        full_q, own_q = decoder.num_heads * dim, self._heads * dim
        self.qkv = ColumnLinear(context, decoder.hidden_size, self._parts(), bias=decoder.attention_bias)
        self.output = RowLinear(
            context,
            "o_proj",
            full_columns=full_q,
            first=tp.rank * own_q,
            columns=own_q,
            out_features=decoder.hidden_size,
            bias=decoder.output_bias,
        )
        norm = (self._heads, self._kv_heads, dim, decoder.rms_eps, decoder.norm_offset)
        self.head_norm = HeadNorm(context, *norm) if decoder.qk_norm else None
        self._temperatures = None
        if self._kind.rope is None and decoder.temperature is not None:
            self._temperatures = _temperatures(decoder.temperature, decoder.max_position).to(context.device)

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        norm = 0 if self.head_norm is None else self.head_norm.held_bytes
        return self.qkv.held_bytes + self.output.held_bytes + norm

    def caches(self) -> list[LayerCache]:
        """Declare what the layer keeps on this rank."""
        decoder, kind = self._decoder, self._kind
        shape = (self._kv_heads, self._dim, self._dim, self._context.cache_dtype.itemsize)
        if kind.mixer == "sliding":
            return [LayerCache(self.layer_index, SlidingWindowSpec(*shape, decoder.window_tokens))]
        if kind.mixer == "chunked":
            return [LayerCache(self.layer_index, ChunkedLocalSpec(*shape, decoder.chunk_tokens))]
        invariant(kind.mixer == "full", f"layer {self.layer_index} is {kind.mixer}, which is no attention")
        return [LayerCache(self.layer_index, FullAttentionSpec(*shape))]

    def attention_needs(self) -> list[AttentionNeed]:
        """Declare what attention computes beyond what the cache says."""
        return [AttentionNeed(self.layer_index, self._heads, soft_cap=self._decoder.score_cap is not None)]

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        norms = {} if self.head_norm is None else self.head_norm.targets(prefix)
        return {**self.qkv.targets(prefix), **self.output.targets(prefix), **norms}

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        self.qkv.finalize()
        self.output.finalize()

    def bind_cache(self, arena: KvArena) -> None:
        """Take the layer's part of the KV memory."""
        scoring = Scoring(self._decoder.score_scale, self._decoder.score_cap)
        self._attend = arena.attention(self.layer_index, scoring)

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, step: StepContext) -> Tensor:
        """Return [T, H] for x [T, H].

        Args:
            x: [T, H].
            turn: rows of cos and of signed sin, each [T, 1, rotated elements]; None for a layer without positions.
            step: of the runner.

        Mutates:
            the KV memory of the step's tokens.
        """
        if self._attend is None:
            raise InvariantError(f"layer {self.layer_index} has no KV memory: bind_cache() was not called")
        tokens, turned = x.shape[0], self._heads + self._kv_heads
        mixed = self.qkv(x).view(tokens, -1, self._dim)
        if self._decoder.attention_gate:
            gate, mixed = mixed[:, : self._heads], mixed[:, self._heads :]
        else:
            gate = None
        qk = mixed[:, :turned]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        if turn is not None:
            qk = rotate(qk, *turn)
            if self._decoder.qk_unit_norm:
                qk = unit_rms_norm(qk, self._decoder.rms_eps)
        q, k, v = qk[:, : self._heads], qk[:, self._heads :], mixed[:, turned:]
        if self._temperatures is not None and self._decoder.temperature is not None:
            interval = (step.positions + 1) // self._decoder.temperature.floor_tokens
            q = (q * self._temperatures[interval][:, None, None]).to(q.dtype)
        attended = self._attend(q, k, v, step).reshape(tokens, -1)
        if gate is not None:
            attended = sigmoid_mul(attended, gate.reshape(tokens, -1), invariant=self._context.invariant)
        return self.output(attended)

    def _parts(self) -> tuple[RowPart, ...]:
        """Return the rows of the packed projection: the gate where there is one, then q, k, v."""
        decoder, dim, first = self._decoder, self._dim, self._context.tp.rank * self._heads
        full_q, full_kv = decoder.num_heads * dim, decoder.num_kv_heads * dim
        value = RowPart("v_proj", full_kv, self._first_kv * dim, self._kv_heads * dim)
        order = _pairs_apart(dim) if any(rope.interleaved for rope in decoder.ropes) else torch.arange(dim)
        key = ordered_part("k_proj", full_kv, _heads_rows(self._first_kv, self._kv_heads, order))
        query = _heads_rows(first, self._heads, order)
        if not decoder.attention_gate:
            return ordered_part("q_proj", full_q, query), key, value
        # The tensor has the query and the gate of one head after the other.
        rows = torch.arange(2 * full_q).view(-1, 2, dim)[first : first + self._heads]
        both = torch.cat((rows[:, 1].flatten(), rows[:, 0, order].flatten()))
        return ordered_part("q_proj", 2 * full_q, both), key, value


def _heads_rows(first: int, heads: int, order: Tensor) -> Tensor:
    """Return the rows of some heads, those of each head in the given order."""
    return (torch.arange(first, first + heads)[:, None] * order.numel() + order).flatten()


def _pairs_apart(dim: int) -> Tensor:
    """Return the order that puts the first elements of all interleaved pairs before the second ones.

    Scores do not change if queries and keys are reordered alike, so a rotation of the pairs (2i, 2i + 1) becomes one of
    (i, i + dim / 2) while the weights are loaded.
    """
    return torch.arange(dim).view(-1, 2).t().flatten()


def _temperatures(temperature: Temperature, max_position: int) -> Tensor:
    """Return the factor on queries for each interval of ``floor_tokens`` positions."""
    intervals = torch.arange(max_position // temperature.floor_tokens + 2, dtype=torch.float32)
    return torch.log1p(intervals) * temperature.scale + 1.0

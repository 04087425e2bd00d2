"""Attention block of a decoder layer: packed q, k, v; optional norm of each head; rotation; attention; output."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.contract import LayerKv
from headrace.base.errors import ConfigError, InvariantError
from headrace.config.decoder import DecoderConfig
from headrace.layers.context import ModelContext
from headrace.layers.linear import ColumnLinear, RowLinear, RowPart, Targets, copy_part
from headrace.ops.norm.eager import head_rms_norm
from headrace.ops.rope.eager import rotate
from headrace.parallel.groups import TensorParallel
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
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
    """RMS norm of each query and key head, before rotation (Qwen3).

    Args:
        context: where it runs.
        heads: query heads on this rank.
        kv_heads: KV heads on this rank.
        dim: of a head.
        eps: added to the mean square.
    """

    def __init__(self, context: ModelContext, heads: int, kv_heads: int, dim: int, eps: float) -> None:
        self._weight = torch.empty(heads + kv_heads, dim, dtype=context.dtype, device=context.device)
        self._heads, self._dim, self._eps = heads, dim, eps

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights."""
        return self._weight.nbytes

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        queries, keys = self._weight[: self._heads], self._weight[self._heads :]
        return {
            f"{prefix}q_norm.weight": WeightTarget((self._dim,), copy_part(queries)),
            f"{prefix}k_norm.weight": WeightTarget((self._dim,), copy_part(keys)),
        }

    def __call__(self, qk: Tensor) -> Tensor:
        """Return the norm of qk [T, heads + kv_heads, D]."""
        return head_rms_norm(qk, self._weight, self._eps)


class Attention:
    """Causal self-attention with rotary positions and grouped query heads.

    Args:
        context: where it runs.
        decoder: dimensions.
        layer_index: position in the model.
    """

    def __init__(self, context: ModelContext, decoder: DecoderConfig, layer_index: int) -> None:
        tp, dim = context.tp, decoder.head_dim
        self._heads = tp.share(decoder.num_heads, "attention heads")
        first_kv, self._kv_heads = kv_share(decoder.num_kv_heads, tp)
        self._dim = dim
        self._scale = dim**-0.5
        self._backend = context.attention
        self._kv: LayerKv | None = None
        self._context = context
        self.layer_index = layer_index
        full_q, full_kv = decoder.num_heads * dim, decoder.num_kv_heads * dim
        own_q, own_kv = self._heads * dim, self._kv_heads * dim
        self.qkv = ColumnLinear(
            context,
            decoder.hidden_size,
            (
                RowPart("q_proj", full_q, tp.rank * own_q, own_q),
                RowPart("k_proj", full_kv, first_kv * dim, own_kv),
                RowPart("v_proj", full_kv, first_kv * dim, own_kv),
            ),
            bias=decoder.attention_bias,
        )
        self.output = RowLinear(
            context,
            "o_proj",
            full_columns=full_q,
            first=tp.rank * own_q,
            columns=own_q,
            out_features=decoder.hidden_size,
            bias=decoder.output_bias,
        )
        self.head_norm = (
            HeadNorm(context, self._heads, self._kv_heads, dim, decoder.rms_eps) if decoder.qk_norm else None
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        norm = 0 if self.head_norm is None else self.head_norm.held_bytes
        return self.qkv.held_bytes + self.output.held_bytes + norm

    def cache(self, dtype_bytes: int) -> LayerCache:
        """Declare what the layer keeps on this rank."""
        return LayerCache(self.layer_index, FullAttentionSpec(self._kv_heads, self._dim, self._dim, dtype_bytes))

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        norms = {} if self.head_norm is None else self.head_norm.targets(prefix)
        return {**self.qkv.targets(prefix), **self.output.targets(prefix), **norms}

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        self.qkv.finalize()
        self.output.finalize()

    def bind_cache(self, kv: LayerKv) -> None:
        """Take the layer's KV memory."""
        self._kv = kv

    def __call__(self, x: Tensor, cos: Tensor, signed_sin: Tensor, step: object) -> Tensor:
        """Return [T, H] for x [T, H].

        Mutates:
            the KV memory of the step's tokens.
        """
        if self._kv is None:
            raise InvariantError(f"layer {self.layer_index} has no KV memory: bind_cache() was not called")
        tokens, turned = x.shape[0], self._heads + self._kv_heads
        mixed = self.qkv(x).view(tokens, turned + self._kv_heads, self._dim)
        qk = mixed[:, :turned]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotate(qk, cos, signed_sin)
        q, k, v = qk[:, : self._heads], qk[:, self._heads :], mixed[:, turned:]
        attended = self._backend.forward(q, k, v, self._kv, step, self._scale)
        return self.output(attended.reshape(tokens, -1))

"""What an attention backend can do, as data. Everything defaults to no. Must not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capability:
    """Capability record of a backend.

    Attributes:
        devices: "cpu", "cuda".
        dtypes: of activations, by name.
        cache_dtypes: of the KV memory, by name.
        max_head_dim: widest head.
        head_dim_multiple: head dims must be a multiple of this.
        grouped_heads: query heads may share a KV head.
        causal: causal attention.
        sliding_window: a position reads a window before it.
        chunked_local: a position reads its own chunk.
        sinks: one sink logit a head.
        soft_cap: capped scores.
        batch_invariant: a row's bits do not depend on the rest of the batch, on chunking or on cache hits.
        graphs: may be captured in a device graph.
        priority: among backends that fit, the highest wins.
    """

    devices: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    cache_dtypes: frozenset[str] = frozenset()
    max_head_dim: int = 0
    head_dim_multiple: int = 1
    grouped_heads: bool = False
    causal: bool = False
    sliding_window: bool = False
    chunked_local: bool = False
    sinks: bool = False
    soft_cap: bool = False
    batch_invariant: bool = False
    graphs: bool = False
    priority: int = 0


TORCH_EXACT = Capability(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32"}),
    cache_dtypes=frozenset({"float32"}),
    max_head_dim=1024,
    grouped_heads=True,
    causal=True,
    sliding_window=True,
    chunked_local=True,
    sinks=True,
    soft_cap=True,
    batch_invariant=True,
    priority=10,
)

TORCH_SDPA = Capability(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    cache_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    max_head_dim=1024,
    grouped_heads=True,
    causal=True,
    sliding_window=True,
    chunked_local=True,
    sinks=True,
    soft_cap=True,
    priority=20,
)

BACKENDS: dict[str, Capability] = {"torch_exact": TORCH_EXACT, "torch_sdpa": TORCH_SDPA}
"""Records of all backends by name. `select.load_backend` must know each of them."""

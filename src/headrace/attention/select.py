"""Chooses the attention backend: a pure function of a request and the capability records, with reasons.

Must not import torch when choosing, and must not look at the machine: the caller passes what it found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.attention.capability import BACKENDS, Capability
from headrace.base.errors import ConfigError, InvariantError, UnsupportedModelError
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    kind_of,
)

if TYPE_CHECKING:
    from headrace.attention.contract import AttentionBackend
    from headrace.attention.memory import BlockMemory

KeyValueSpec = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalSpec


@dataclass(frozen=True)
class AttentionNeed:
    """What a layer's attention needs beyond what its cache spec says, on this rank.

    Attributes:
        layer_index: of the layer.
        heads: query heads.
        soft_cap: scores are capped.
        sinks: heads have sink logits.
        part: of the layer's cache declaration.
    """

    layer_index: int
    heads: int
    soft_cap: bool = False
    sinks: bool = False
    part: str = "kv"


@dataclass(frozen=True)
class AttentionRequest:
    """What a model needs from attention on a device.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of activations, by name ("float32").
        cache_dtype: of the KV memory, by name.
        head_dim: elements of a head.
        heads: query heads on this rank.
        kv_heads: KV heads on this rank.
        batch_invariant: the answer's bits must not depend on the rest of the batch.
        sliding_window: needed.
        chunked_local: needed.
        sinks: needed.
        soft_cap: needed.
        graphs: needed.
    """

    device: str
    dtype: str
    cache_dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    batch_invariant: bool = False
    sliding_window: bool = False
    chunked_local: bool = False
    sinks: bool = False
    soft_cap: bool = False
    graphs: bool = False


@dataclass(frozen=True)
class CommonNeeds:
    """What all attention layers of a model need alike; see `AttentionRequest`.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of activations, by name.
        cache_dtype: of keys and values, by name.
        batch_invariant: needed.
    """

    device: str
    dtype: str
    cache_dtype: str
    batch_invariant: bool = False


@dataclass(frozen=True)
class Selection:
    """The answer of `select`.

    Attributes:
        backend: name of the chosen one.
        reason: why it was chosen.
        refused: every other backend and why not.
    """

    backend: str
    reason: str
    refused: dict[str, str]


def refusal(request: AttentionRequest, capability: Capability) -> str | None:
    """Return why a backend cannot serve a request, or None if it can."""
    checks = (
        (request.device in capability.devices, f"no {request.device}"),
        (request.dtype in capability.dtypes, f"no {request.dtype} activations"),
        (request.cache_dtype in capability.cache_dtypes, f"no {request.cache_dtype} cache"),
        (request.head_dim <= capability.max_head_dim, f"head dim {request.head_dim} > {capability.max_head_dim}"),
        (
            request.head_dim % capability.head_dim_multiple == 0,
            f"head dim {request.head_dim} is not a multiple of {capability.head_dim_multiple}",
        ),
        (request.heads == request.kv_heads or capability.grouped_heads, "no grouped query heads"),
        (capability.causal, "not causal"),
        (not request.sliding_window or capability.sliding_window, "no sliding window"),
        (not request.chunked_local or capability.chunked_local, "no chunked local attention"),
        (not request.sinks or capability.sinks, "no sinks"),
        (not request.soft_cap or capability.soft_cap, "no soft cap"),
        (not request.graphs or capability.graphs, "cannot be captured in a graph"),
        (not request.batch_invariant or capability.batch_invariant, "not batch-invariant"),
    )
    for holds, why in checks:
        if not holds:
            return why
    return None


def select(
    request: AttentionRequest, *, wanted: str = "auto", candidates: Mapping[str, Capability] | None = None
) -> Selection:
    """Choose a backend.

    Args:
        request: what is needed.
        wanted: "auto", or the only name to take.
        candidates: capability records by name; None takes `BACKENDS`.

    Returns:
        The choice, its reason, and why each other one was refused.

    Raises:
        ConfigError: unknown name, or nothing fits; the message has every reason.
    """
    records = BACKENDS if candidates is None else candidates
    if wanted != "auto" and wanted not in records:
        raise ConfigError(
            f"unknown attention backend {wanted!r}; known: auto, {', '.join(records)}", param="attention_backend"
        )
    refused = {name: why for name, record in records.items() if (why := refusal(request, record)) is not None}
    if wanted != "auto":
        if wanted in refused:
            raise ConfigError(
                f"attention backend {wanted} cannot be used: {refused[wanted]}; leave --attention-backend at auto",
                param="attention_backend",
            )
        others = {name: refused.get(name, f"{wanted} was asked for") for name in records if name != wanted}
        return Selection(wanted, "asked for", others)
    fitting = sorted((name for name in records if name not in refused), key=lambda n: (-records[n].priority, n))
    if not fitting:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(f"no attention backend fits: {reasons}", param="attention_backend")
    best = fitting[0]
    for name in fitting[1:]:
        refused[name] = f"{best} has priority {records[best].priority} over {records[name].priority}"
    return Selection(best, f"fits, with the highest priority ({records[best].priority})", refused)


def select_by_spec(
    caches: Sequence[LayerCache], needs: Sequence[AttentionNeed], common: CommonNeeds, *, wanted: str = "auto"
) -> dict[KeyValueSpec, Selection]:
    """Choose a backend for each cache spec, so for each group: masks and head dims differ between them.

    Args:
        caches: what the model's layers declare.
        needs: what their attention needs beyond that.
        common: the same for all layers.
        wanted: "auto", or the only backend to take.

    Returns:
        One choice for each spec that holds keys and values; recurrent specs need none.

    Raises:
        UnsupportedModelError: a kind of cache that no backend here serves yet.
        ConfigError: nothing fits a group; the message has every reason.
    """
    keys: dict[tuple[int, str], CacheSpec] = {(cache.layer_index, cache.part): cache.spec for cache in caches}
    by_spec: dict[KeyValueSpec, list[AttentionNeed]] = {}
    for cache in caches:
        if isinstance(cache.spec, KeyValueSpec):
            by_spec.setdefault(cache.spec, [])
        elif not isinstance(cache.spec, RecurrentSpec | SharedSpec | NoCacheSpec):
            raise UnsupportedModelError(f"no attention backend serves {kind_of(cache.spec)} caches yet")
    for need in needs:
        spec = keys[need.layer_index, need.part]
        if isinstance(spec, SharedSpec):
            spec = keys[spec.source_layer, need.part]
        if not isinstance(spec, KeyValueSpec):
            raise InvariantError(f"layer {need.layer_index} asks for attention over a {kind_of(spec)} cache")
        by_spec[spec].append(need)
    return {spec: select(_request(spec, found, common), wanted=wanted) for spec, found in by_spec.items()}


def _request(spec: KeyValueSpec, needs: list[AttentionNeed], common: CommonNeeds) -> AttentionRequest:
    return AttentionRequest(
        device=common.device,
        dtype=common.dtype,
        cache_dtype=common.cache_dtype,
        head_dim=spec.key_dim,
        heads=max((need.heads for need in needs), default=spec.kv_heads),
        kv_heads=spec.kv_heads,
        batch_invariant=common.batch_invariant,
        sliding_window=isinstance(spec, SlidingWindowSpec),
        chunked_local=isinstance(spec, ChunkedLocalSpec),
        sinks=any(need.sinks for need in needs),
        soft_cap=any(need.soft_cap for need in needs),
    )


def load_backend(name: str, memory: BlockMemory) -> AttentionBackend:
    """Return a new backend by name over the memory of a group; imports torch.

    Raises:
        ConfigError: unknown name.
    """
    if name == "torch_exact":
        from headrace.attention.torch_exact import TorchExact

        return TorchExact(memory)
    if name == "torch_sdpa":
        from headrace.attention.torch_sdpa import TorchSdpa

        return TorchSdpa(memory)
    raise ConfigError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}", param="attention_backend")

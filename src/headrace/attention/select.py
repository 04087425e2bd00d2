"""Chooses the attention backend: a pure function of a request and the capability records, with reasons.

Must not import torch when choosing, and must not look at the machine: the caller passes what it found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.attention.capability import BACKENDS, Capability
from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from headrace.attention.contract import AttentionBackend


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
    sinks: bool = False
    soft_cap: bool = False
    graphs: bool = False


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


def load_backend(name: str) -> AttentionBackend:
    """Return a new backend by name; imports torch.

    Raises:
        ConfigError: unknown name.
    """
    if name == "torch_exact":
        from headrace.attention.torch_exact import TorchExact

        return TorchExact()
    if name == "torch_sdpa":
        from headrace.attention.torch_sdpa import TorchSdpa

        return TorchSdpa()
    raise ConfigError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}", param="attention_backend")

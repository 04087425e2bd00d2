"""Which attention backend each group of layers would get on a device, and why. Must not import torch."""

from __future__ import annotations

import msgspec

from headrace.attention.select import AttentionNeed, CommonNeeds, select_by_spec
from headrace.config.decoder import DecoderConfig
from headrace.engine.model_bytes import Formats
from headrace.types.cache_specs import LayerCache, RecurrentSpec, kind_of


class AttentionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The backend of the layers that share one cache spec.

    Attributes:
        kind: of the cache: "full", "sliding", "chunked".
        layers: how many.
        head_dim: elements of a head.
        backend: chosen.
        reason: why.
        refused: every other backend and why not.
    """

    kind: str
    layers: int
    head_dim: int
    backend: str
    reason: str
    refused: dict[str, str]


def attention_choices(
    decoder: DecoderConfig, caches: list[LayerCache], formats: Formats, *, device: str, ranks: int, wanted: str
) -> list[AttentionChoice]:
    """Choose as the worker would.

    Args:
        decoder: dimensions.
        caches: what each layer keeps on one rank.
        formats: types of activations and cache.
        device: "cpu" or "cuda".
        ranks: that share the heads.
        wanted: ``--attention-backend``.

    Raises:
        ConfigError: no backend fits a group, or not the one that is asked for.
    """
    # As in `worker.worker`: fp32 on a CPU promises the same bits whatever runs beside.
    invariant = device == "cpu" and formats.dtype == "float32" and not formats.int8
    common = CommonNeeds(device, formats.dtype, formats.cache_dtype, batch_invariant=invariant)
    heads, capped = decoder.num_heads // ranks, decoder.score_cap is not None
    needs = [
        AttentionNeed(cache.layer_index, heads, soft_cap=capped)
        for cache in caches
        if not isinstance(cache.spec, RecurrentSpec)
    ]
    return [
        AttentionChoice(
            kind=kind_of(spec),
            layers=sum(cache.spec == spec for cache in caches),
            head_dim=spec.key_dim,
            backend=choice.backend,
            reason=choice.reason,
            refused=choice.refused,
        )
        for spec, choice in select_by_spec(caches, needs, common, wanted=wanted).items()
    ]

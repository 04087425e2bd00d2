"""Rotary embeddings as ``config.json`` describes them: base, scaling, rotated part of the head.

Pure. Must not compute frequencies (see `ops.rope.frequencies`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import UnsupportedModelError
from headrace.config.decoder_keys import count, positive, positive_or_none, switch


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies.

    Attributes:
        kind: "none", "linear", "llama3" or "yarn".
        factor: extension factor.
        original_max_len: length the model was trained for before scaling.
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only.
        attention_factor: yarn: multiplies cos and sin; None means the default ``0.1 ln(factor) + 1``.
        beta_fast: yarn.
        beta_slow: yarn.
        mscale: yarn (DeepSeek style), or None.
        mscale_all_dim: yarn (DeepSeek style), or None.
        truncate: yarn: round the correction range to whole dimensions.
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """A rotary embedding of some layers.

    Attributes:
        theta: base of the geometric series of frequencies.
        dim: rotated elements, at the front of a head; even.
        scaling: how the series is stretched.
        interleaved: the pairs are (2i, 2i + 1), not (i, i + dim / 2).
    """

    theta: float
    dim: int
    scaling: RopeScaling = RopeScaling()
    interleaved: bool = False


def parse_rope(config: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling]:
    """Read the rotary embedding from either the old keys (rope_theta, rope_scaling) or the new one (rope_parameters).

    Args:
        config: parsed ``config.json``.
        max_position: ``max_position_embeddings``, the original length where the scaling gives none.

    Returns:
        Theta and the scaling.

    Raises:
        UnsupportedModelError: a scaling type that is not implemented, or one without its parameters.
    """
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping) or any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModelError("rope parameters per layer type are not supported", param="rope_parameters")
    partial = {"partial_rotary_factor": config.get("partial_rotary_factor"), **raw}
    if positive(partial, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "partial_rotary_factor other than 1 is not supported", param="partial_rotary_factor"
        )
    theta = positive({"rope_theta": config.get("rope_theta"), **raw}, "rope_theta", 10000.0)
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn", param="rope_scaling"
        )
    original = count({**config, **raw}, "original_max_position_embeddings", max_position)
    return theta, RopeScaling(
        kind=kind,
        factor=positive(raw, "factor"),
        original_max_len=original,
        low_freq_factor=positive(raw, "low_freq_factor", 1.0),
        high_freq_factor=positive(raw, "high_freq_factor", 4.0),
        attention_factor=positive_or_none(raw, "attention_factor"),
        beta_fast=positive(raw, "beta_fast", 32.0),
        beta_slow=positive(raw, "beta_slow", 1.0),
        mscale=positive_or_none(raw, "mscale"),
        mscale_all_dim=positive_or_none(raw, "mscale_all_dim"),
        truncate=switch(raw, "truncate", default=True),
    )


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Return the factor on cos and sin (arXiv 2309.00071, and its DeepSeek variant with mscale)."""
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)

    def get_mscale(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return get_mscale(scaling.factor, scaling.mscale) / get_mscale(scaling.factor, scaling.mscale_all_dim)
    return get_mscale(scaling.factor)


def extended_length(scaling: RopeScaling, max_position: int) -> int:
    """Return the length of the model in tokens.

    A yarn config often keeps the trained length in ``max_position_embeddings``; the scaling is what extends it. The
    other kinds are written with the extended length already.
    """
    if scaling.kind != "yarn":
        return max_position
    return max(max_position, round(scaling.original_max_len * scaling.factor))

"""Inverse frequencies of rotary embeddings and their scalings: default, linear, llama3, yarn. Pure arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.base.errors import UnsupportedModelError
from headrace.config.rope import RopeScaling, yarn_attention_factor


def inverse_frequencies(theta: float, dim: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Return ([dim/2] fp32 inverse frequencies, factor on cos and sin).

    Args:
        theta: base of the geometric series.
        dim: rotated dimensions of a head, even.
        scaling: how the series is stretched.

    Raises:
        UnsupportedModelError: unknown scaling.
    """
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if scaling.kind == "none":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(theta, dim, scaling), yarn_attention_factor(scaling)
    raise UnsupportedModelError(f"rope scaling {scaling.kind!r} is not supported", param="rope_scaling")


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves divided by the factor, short ones kept, a linear ramp in between."""
    wavelength = 2 * math.pi / plain
    longest = scaling.original_max_len / scaling.low_freq_factor
    shortest = scaling.original_max_len / scaling.high_freq_factor
    ramp = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - ramp) * plain / scaling.factor + ramp * plain
    scaled = torch.where(wavelength > longest, plain / scaling.factor, between)
    return torch.where(wavelength < shortest, plain, scaled)


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): "by parts" mix of kept and interpolated frequencies."""
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept, interpolated = 1.0 / powers, 1.0 / (scaling.factor * powers)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(scaling.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return interpolated * ramp + kept * (1 - ramp)

"""Linear maps in fp32, plain and with 8-bit integers, written for reading. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` with fp32 sums.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N].
    """
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [M, K], scale [M, 1]) with ``x ~ int8 * scale``; symmetric, one scale a row.

    Args:
        x: [M, K] fp32.
    """
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-20) / 127
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def linear_int8(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` with both sides rounded to int8: a scale for each row of x and each row of weight.

    Args:
        x: [M, K] fp32.
        weight: [N, K] fp32.
    """
    x8, x_scale = quantise_rows(x)
    w8, w_scale = quantise_rows(weight)
    return (x8.double() @ w8.double().t()).float() * x_scale * w_scale.t()

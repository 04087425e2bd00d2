"""Gated activations through torch's operators, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.activation.rows import ONE_THREAD_ELEMENTS, by_rows


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    Args:
        gate_up: [T, 2 I], gate first.

    Mutates:
        ``gate_up``: its gate half is overwritten.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul(up)


def silu_mul_invariant(gate_up: Tensor) -> Tensor:
    """As `silu_mul`; each row's bits are independent of the other rows.

    The gate half is strided, so the loop begins anew in each row as long as no thread splits it; see `rows`.
    """
    width = gate_up.shape[-1] // 2
    rows = max(1, (ONE_THREAD_ELEMENTS - 1) // width)
    out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    for first in range(0, gate_up.shape[0], rows):
        gate, up = gate_up[first : first + rows].chunk(2, dim=-1)
        torch.mul(F.silu(gate, inplace=True), up, out=out[first : first + rows])
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` with the tanh form of GELU.

    Args:
        gate_up: [T, 2 I], gate first.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_mul_invariant(gate_up: Tensor) -> Tensor:
    """As `gelu_mul`; each row's bits are independent of the other rows, as in `silu_mul_invariant`."""
    width = gate_up.shape[-1] // 2
    rows = max(1, (ONE_THREAD_ELEMENTS - 1) // width)
    out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    for first in range(0, gate_up.shape[0], rows):
        gate, up = gate_up[first : first + rows].chunk(2, dim=-1)
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=out[first : first + rows])
    return out


def sigmoid_mul(x: Tensor, gate: Tensor, *, invariant: bool) -> Tensor:
    """Return ``x * sigmoid(gate)``.

    Args:
        x: [T, W].
        gate: [T, W] or [T, 1].
        invariant: each row's bits are independent of the other rows.
    """
    return x * (by_rows(gate, torch.sigmoid_) if invariant else torch.sigmoid(gate))


def soft_cap(x: Tensor, cap: float, *, invariant: bool) -> Tensor:
    """Return ``cap * tanh(x / cap)``.

    Args:
        x: [T, W].
        cap: bound of the magnitude.
        invariant: each row's bits are independent of the other rows.
    """
    scaled = x / cap
    return (by_rows(scaled, torch.tanh_) if invariant else scaled.tanh_()).mul(cap)

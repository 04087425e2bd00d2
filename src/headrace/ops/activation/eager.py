"""Gated activations through torch's operators, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ONE_THREAD_ELEMENTS = 32768
"""torch splits an element-wise operator of this size over threads, at places that depend on the shape."""


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

    torch's vector and scalar exponentials differ in the last bit, and which elements are the scalar remainder depends
    on where a loop begins. The gate half is strided, so the loop begins anew in each row as long as no thread splits
    it.
    """
    width = gate_up.shape[-1] // 2
    rows = max(1, (_ONE_THREAD_ELEMENTS - 1) // width)
    out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    for first in range(0, gate_up.shape[0], rows):
        gate, up = gate_up[first : first + rows].chunk(2, dim=-1)
        torch.mul(F.silu(gate, inplace=True), up, out=out[first : first + rows])
    return out

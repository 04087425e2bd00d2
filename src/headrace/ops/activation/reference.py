"""Gated activations in fp32, written for reading. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (SwiGLU, arXiv 2002.05202).

    Args:
        gate_up: [T, 2 I], gate first.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

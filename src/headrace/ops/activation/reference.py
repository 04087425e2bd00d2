"""Gated activations in fp32, written for reading. The oracle; must not be fast."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (SwiGLU, arXiv 2002.05202).

    Args:
        gate_up: [T, 2 I], gate first.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` (GeGLU, arXiv 2002.05202) with the tanh form of GELU (arXiv 1606.08415).

    Args:
        gate_up: [T, 2 I], gate first.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)

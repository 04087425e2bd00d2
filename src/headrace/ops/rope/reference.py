"""Rotary embedding as a rotation of pairs, in fp32. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by ``position * inverse_frequency[i]`` (arXiv 2104.09864).

    Args:
        x: [T, heads, D].
        positions: [T].
        inverse_frequencies: [D/2].
        factor: multiplies the result (the attention factor of YaRN).
    """
    angle = positions.to(torch.float32)[:, None, None] * inverse_frequencies.float()
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)
    return (turned * factor).to(x.dtype)

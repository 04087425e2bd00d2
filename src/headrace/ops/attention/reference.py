"""Causal grouped-query attention of one row, as plain mathematics in fp32. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from the last ``n`` positions to all positions up to each.

    Args:
        q: [n, heads, D], the last n positions of the row.
        k: [S, kv_heads, D], all positions.
        v: [S, kv_heads, D].
        scale: factor on the scores.

    Returns:
        [n, heads, D].
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    group = heads // kv_heads
    wide_k = k.float().repeat_interleave(group, dim=1)
    wide_v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) * scale
    position = torch.arange(length - n, length)[:, None]
    scores = scores.masked_fill(torch.arange(length)[None, :] > position, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), wide_v).to(q.dtype)

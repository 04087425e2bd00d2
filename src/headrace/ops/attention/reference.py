"""Causal grouped-query attention of one row, as plain mathematics in fp32. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    window_tokens: int = 0,
    chunk_tokens: int = 0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the last ``n`` positions to the positions up to each.

    Args:
        q: [n, heads, D], the last n positions of the row.
        k: [S, kv_heads, D], all positions.
        v: [S, kv_heads, D].
        scale: factor on the scores.
        window_tokens: position p reads p - window_tokens + 1 to p; 0 reads all (Mistral 7B, arXiv 2310.06825).
        chunk_tokens: p reads from p // chunk_tokens * chunk_tokens to p; 0 reads all (Llama 4).
        soft_cap: c in c * tanh(score / c) (Gemma 2, arXiv 2408.00118).
        sinks: [heads] logits that take weight and give nothing (gpt-oss; "attention sinks", arXiv 2309.17453).

    Returns:
        [n, heads, D].
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    group = heads // kv_heads
    wide_k = k.float().repeat_interleave(group, dim=1)
    wide_v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - n, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    hidden = key > position
    if window_tokens:
        hidden |= key <= position - window_tokens
    if chunk_tokens:
        hidden |= key // chunk_tokens != position // chunk_tokens
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    taken = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        taken = taken + sinks.float().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / taken, wide_v).to(q.dtype)

"""What the backends that gather from block memory have in common. Must not know how rows are batched."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.contract import Scoring


def scored_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Attend with a cap on the scores or with sinks, in fp32: what `scaled_dot_product_attention` does not offer.

    Args:
        q: [..., kv_heads, group, n, D]; a KV head's query heads stand beside it.
        k: [..., kv_heads, 1, S, D].
        v: [..., kv_heads, 1, S, D].
        mask: broadcast to [..., kv_heads, group, n, S]; 0 or -inf; every query sees at least one key.
        scoring: scale, cap and sinks.

    Returns:
        [..., kv_heads, group, n, D] in the type of ``v``.
    """
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scoring.scale)
    if scoring.soft_cap is not None:
        scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    scores = scores.add_(mask)
    if scoring.sinks is not None:
        kv_heads, group, n, _ = scores.shape[-4:]
        sinks = scoring.sinks.float().view(kv_heads, group, 1, 1).expand(*scores.shape[:-4], -1, -1, n, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights, v.float()).to(v.dtype)

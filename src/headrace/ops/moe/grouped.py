"""Mixture of experts by groups: the tokens of an expert are computed together, and only chosen experts at all.

A token's bits depend on the token alone as long as each expert's own map keeps that promise: nothing is summed across
tokens, and the results of a token's experts are added in the order of its own choice. Must not know how an expert is
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.ops.activation.rows import by_rows


def route_softmax(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return (weights, experts), each [T, top_k]; see `reference.softmax_weights`.

    Args:
        logits: [T, E].
        top_k: experts of a token.
        renormalise: divide by the sum of the chosen.
    """
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalise:
        total = weights[:, 0]
        for place in range(1, top_k):
            total = total + weights[:, place]
        weights = weights / total[:, None]
    return weights, experts


def route_sigmoid(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return (weights, experts), each [T, top_k]; see `reference.sigmoid_weights`.

    Args:
        logits: [T, E].
        top_k: experts of a token.
    """
    experts = logits.topk(top_k, dim=-1).indices
    return by_rows(logits.float(), torch.sigmoid_).gather(1, experts), experts


def mixture(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor]],
    *,
    on_input: bool,
) -> Tensor:
    """Return the weighted sum of each token's experts; see `reference.mixture`.

    Args:
        x: [T, H].
        weights: [T, k].
        chosen: [T, k] indices into ``experts``.
        experts: maps [n, H] -> [n, H].
        on_input: a weight multiplies the expert's input, not its output.
    """
    top_k = chosen.shape[1]
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    factors = weights.reshape(-1, 1).to(x.dtype)
    parts = x.new_empty(flat.shape[0], x.shape[1])
    first = 0
    for expert, members in enumerate(torch.bincount(flat, minlength=len(experts)).tolist()):
        if not members:
            continue
        pairs = order[first : first + members]
        first += members
        entering = x.index_select(0, pairs // top_k)
        factor = factors.index_select(0, pairs)
        result = experts[expert](entering.mul_(factor)) if on_input else experts[expert](entering).mul(factor)
        parts.index_copy_(0, pairs, result)
    by_token = parts.view(-1, top_k, x.shape[1])
    total = by_token[:, 0].clone()
    for place in range(1, top_k):
        total += by_token[:, place]
    return total

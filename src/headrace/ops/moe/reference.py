"""Mixture of experts in fp32, every expert for every token, written for reading. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_weights(logits: Tensor, top_k: int, renormalise: bool) -> Tensor:
    """Return [T, E] weights: the softmax of the logits, zero outside the ``top_k`` largest of each token.

    Args:
        logits: [T, E].
        top_k: experts of a token.
        renormalise: divide by the sum of the chosen.
    """
    share = torch.softmax(logits.float(), dim=-1)
    chosen = torch.zeros_like(share).scatter_(1, share.topk(top_k, dim=-1).indices, 1.0)
    kept = share * chosen
    return kept / kept.sum(-1, keepdim=True) if renormalise else kept


def sigmoid_weights(logits: Tensor, top_k: int) -> Tensor:
    """Return [T, E] weights: the sigmoid of each chosen logit, zero elsewhere (Llama 4)."""
    chosen = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.topk(top_k, dim=-1).indices, 1.0)
    return chosen / (1 + torch.exp(-logits.float()))


def mixture(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, on_input: bool) -> Tensor:
    """Return the weighted sum of the experts ``down(silu(gate(x)) * up(x))`` (arXiv 1701.06538).

    Args:
        x: [T, H].
        weights: [T, E].
        gate_up: [E, 2 I, H], gate first.
        down: [E, H, I].
        on_input: a weight multiplies the expert's input, not its output. An expert of weight 0 then gives zero too.
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(weights.shape[1]):
        weight = weights[:, expert, None].float()
        entering = x.float() * weight if on_input else x.float()
        gate, up = (entering @ gate_up[expert].float().t()).chunk(2, dim=-1)
        result = (gate / (1 + torch.exp(-gate)) * up) @ down[expert].float().t()
        total += result if on_input else result * weight
    return total.to(x.dtype)

"""Causal convolution and gated delta rule, token by token in fp32. The oracle; must not be fast."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return (silu of the depthwise causal convolution, new tail).

    Args:
        x: [T, C] inputs of one sequence.
        weight: [C, W]; the last column meets the newest input.
        tail: [W - 1, C] the inputs before ``x``.
    """
    width = weight.shape[1]
    window = torch.cat((tail.float(), x.float()))
    out = torch.stack([(window[t : t + width] * weight.float().t()).sum(0) for t in range(x.shape[0])])
    return (out / (1 + torch.exp(-out))).to(x.dtype), window[-(width - 1) :].to(tail.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (outputs, new state) of the gated delta rule (arXiv 2412.06464, equation 10).

    For each token: ``S = exp(g) S``; ``u = beta (v - S^T k)``; ``S = S + k u^T``; ``o = S^T q``.

    Args:
        q: [T, H, K] of one sequence, normalised and scaled.
        k: [T, H, K], normalised.
        v: [T, H, V].
        log_decay: [T, H], at most 0.
        beta: [T, H], in (0, 1).
        state: [H, K, V] fp32; not changed.

    Returns:
        [T, H, V] fp32 and [H, K, V] fp32.
    """
    out = torch.zeros(v.shape, dtype=torch.float32)
    state = state.clone()
    for t in range(q.shape[0]):
        state = state * log_decay[t].float().exp()[:, None, None]
        predicted = torch.einsum("hkv,hk->hv", state, k[t].float())
        update = beta[t].float()[:, None] * (v[t].float() - predicted)
        state = state + torch.einsum("hk,hv->hkv", k[t].float(), update)
        out[t] = torch.einsum("hkv,hk->hv", state, q[t].float())
    return out, state

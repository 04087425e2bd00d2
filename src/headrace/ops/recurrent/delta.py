"""Gated delta rule in fp32: one token of many rows, a whole chunk of one row, and token by token for equal bits.

The chunked form sums in another order than the recurrence, and where a chunk begins depends on how a prompt was cut.
Where bits must not depend on that, `scan` goes through the tokens one by one, with the same shapes for each. Must not
know where states are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.ops.activation.rows import by_rows

CHUNK_TOKENS = 64


class DeltaInputs(NamedTuple):
    """What the rule takes of each token.

    Attributes:
        q: [T, H, K] fp32, normalised and scaled.
        k: [T, H, K] fp32, normalised.
        v: [T, H, V] fp32.
        log_decay: [T, H] fp32, at most 0.
        beta: [T, H] fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    def part(self, tokens: slice) -> DeltaInputs:
        """Return some adjacent tokens."""
        return DeltaInputs(*(tensor[tokens] for tensor in self))

    def picked(self, places: Tensor) -> DeltaInputs:
        """Return the tokens at [n] places."""
        return DeltaInputs(*(tensor.index_select(0, places) for tensor in self))


def step(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Return the outputs for one token of each row; see `reference.gated_delta_rule`.

    Args:
        inputs: one token a row.
        state: [R, H, K, V] fp32.

    Returns:
        [R, H, V].

    Mutates:
        ``state``.
    """
    q, k, v, log_decay, beta = inputs
    state.mul_(log_decay.exp()[..., None, None])
    predicted = torch.matmul(k[..., None, :], state)[..., 0, :]
    update = (v - predicted).mul_(beta[..., None])
    state.add_(k[..., :, None] * update[..., None, :])
    return torch.matmul(q[..., None, :], state)[..., 0, :]


def scan(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Return the outputs of one row, token by token: a token's bits depend on its row up to it, and on nothing else.

    Args:
        inputs: of the row's tokens.
        state: [H, K, V] fp32, contiguous.

    Returns:
        [T, H, V].

    Mutates:
        ``state``.
    """
    q, k, v, log_decay, beta = inputs
    decay = by_rows(log_decay, torch.exp_)
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        key = k[t, :, :, None]
        state.mul_(decay[t, :, None, None])
        update = (v[t] - (state * key).sum(1)).mul_(beta[t, :, None])
        state.add_(key * update[:, None])
        torch.sum(state * q[t, :, :, None], dim=1, out=out[t])
    return out


def chunked(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Return the outputs of one row, by chunks of 64 tokens (arXiv 2412.06464, section 3.3).

    Inside a chunk the updates of all tokens solve one triangular system: with G the running sum of the log decays and
    ``A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j)`` for j < i, they are ``(I + A)^-1 beta (v - exp(G) k S)``. Every
    exponent that is applied is at most 0.

    Args:
        inputs: of the row's tokens.
        state: [H, K, V] fp32.

    Returns:
        [T, H, V].

    Mutates:
        ``state``.
    """
    q, k, v, log_decay, beta = inputs
    out = torch.empty_like(v)
    for first in range(0, q.shape[0], CHUNK_TOKENS):
        part = slice(first, first + CHUNK_TOKENS)
        keys, queries, values = (x[part].transpose(0, 1) for x in (k, q, v))
        exact = log_decay[part].t().double().cumsum(1)  # differences of large sums
        since = exact.float()
        rate = beta[part].t()[..., None]
        gap = (exact[:, :, None] - exact[:, None, :]).float()
        between = gap.masked_fill_(torch.ones_like(gap[0], dtype=torch.bool).triu_(1), -torch.inf).exp_()
        grown = since.exp()[..., None]
        system = (keys @ keys.transpose(1, 2)).mul_(between).mul_(rate)
        wanted = rate * (values - (keys * grown) @ state)
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        scores = (queries @ keys.transpose(1, 2)).mul_(between)
        out[part] = ((queries * grown) @ state + scores @ updates).transpose(0, 1)
        left = (exact[:, -1:] - exact).float().exp()[..., None]
        state.mul_(since[:, -1].exp()[:, None, None]).add_((keys * left).transpose(1, 2) @ updates)
    return out

"""Depthwise causal convolution of the rows of a step, each with the tail that it keeps between steps.

Products and sums of single elements only, without fused multiply-add: a token's bits depend on its own window. Must not
know what the channels are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.activation.rows import by_rows


@dataclass(frozen=True)
class ConvPlan:
    """Where the rows of a step stand in the padded sequence that a convolution of one width reads.

    Attributes:
        rows: number of rows.
        tails: [rows * (W - 1)] places of the tails, row by row, oldest input first.
        tokens: [T] places of the step's inputs.
        ends: [rows * (W - 1)] places of the last inputs, row by row.
        total: length of the padded sequence.
        width: W.
    """

    rows: int
    tails: Tensor
    tokens: Tensor
    ends: Tensor
    total: int
    width: int


def plan_conv(tokens: list[int], width: int, device: torch.device) -> ConvPlan:
    """Return the places of a step's rows; all layers of one width share them.

    Args:
        tokens: of each row, at least 1.
        width: W, at least 2.
        device: of the result.
    """
    keep = width - 1
    counts = torch.tensor(tokens)
    firsts = torch.cumsum(counts + keep, 0) - (counts + keep)
    offsets = torch.arange(keep)
    places = torch.arange(int(counts.sum())) + torch.repeat_interleave(torch.arange(1, len(tokens) + 1) * keep, counts)
    return ConvPlan(
        rows=len(tokens),
        tails=(firsts[:, None] + offsets).flatten().to(device),
        tokens=places.to(device),
        ends=((firsts + counts)[:, None] + offsets).flatten().to(device),
        total=int(counts.sum()) + keep * len(tokens),
        width=width,
    )


def causal_conv(x: Tensor, weight: Tensor, tails: Tensor, plan: ConvPlan, *, invariant: bool) -> tuple[Tensor, Tensor]:
    """Return (silu of the convolution, new tails); see `reference.causal_conv`.

    Args:
        x: [T, C], the rows of the step one after the other.
        weight: [W, C]; the last row meets the newest input.
        tails: [rows, W - 1, C] the inputs before each row.
        plan: of the step.
        invariant: a token's bits do not depend on the other rows.

    Returns:
        [T, C] and [rows, W - 1, C].
    """
    channels = x.shape[1]
    padded = x.new_empty(plan.total, channels)
    padded.index_copy_(0, plan.tails, tails.reshape(-1, channels).to(x.dtype))
    padded.index_copy_(0, plan.tokens, x)
    newest = plan.width - 1
    out = x * weight[newest]
    for age in range(1, plan.width):
        out = out.add_(padded.index_select(0, plan.tokens - age) * weight[newest - age])
    out = by_rows(out, lambda part: F.silu(part, inplace=True)) if invariant else F.silu(out, inplace=True)
    return out, padded.index_select(0, plan.ends).view(plan.rows, newest, channels)

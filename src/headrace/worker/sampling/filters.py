"""Top-k, top-p and min-p as one threshold a row, found without sorting the vocabulary, and the draw that follows.

A filter keeps the tokens whose scaled logit reaches a threshold, so equal logits stay or go together and no tie-break
depends on an algorithm. Tokens are drawn by inverse transform in the order of their ids, so how candidates were found
cannot change the draw. Must not know requests or slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.worker.sampling.draw_params import DrawParams
from headrace.worker.sampling.rowwise import (
    SUM_BLOCK_TOKENS,
    block_sums,
    fold_columns,
    row_mass,
    row_sorted,
    row_top_columns,
    to_device,
)
from headrace.worker.sampling.wide_rows import draw_wide_rows

FOLD = 16
CANDIDATE_COLUMNS = 256


@dataclass(frozen=True)
class Candidates:
    """The likeliest tokens of each row.

    Attributes:
        ids: [rows, count], ascending.
        values: [rows, count] logits.
        bound: [rows]; every token with a larger logit is a candidate.
    """

    ids: Tensor
    values: Tensor
    bound: Tensor


def find_candidates(logits: Tensor, columns: int) -> Candidates:
    """Return a superset of the ``columns`` likeliest tokens of each row.

    A row is folded into columns of `FOLD` tokens; the columns with the largest maxima hold the largest tokens. One pass
    over the logits, and the rest works on few numbers.

    Args:
        logits: [rows, vocab] float32.
        columns: folded columns to keep; the candidates are ``FOLD`` times as many.
    """
    rows = logits.shape[0]
    folded = fold_columns(logits, FOLD, -torch.inf).view(rows, FOLD, -1)
    width = folded.shape[2]
    if columns >= width:
        return all_candidates(logits)
    peaks = folded.amax(dim=1)
    kept = row_top_columns(peaks, columns)
    bound = peaks.gather(1, kept).amin(dim=1)
    values = folded.gather(2, kept[:, None, :].expand(-1, FOLD, -1)).reshape(rows, -1)
    offsets = torch.arange(0, FOLD * width, width, device=logits.device)
    ids = (kept[:, None, :] + offsets[None, :, None]).reshape(rows, -1)
    return Candidates(ids, values, bound)


def all_candidates(logits: Tensor) -> Candidates:
    """Return every token as a candidate."""
    rows, vocab = logits.shape
    ids = torch.arange(vocab, device=logits.device).expand(rows, -1)
    return Candidates(ids, logits, torch.full((rows,), -torch.inf, device=logits.device))


def scale(values: Tensor, peaks: Tensor, temperature: Tensor) -> Tensor:
    """Return ``(values - peaks) / temperature``: at most 0, and no overflow for a tiny temperature."""
    return (values - peaks[:, None]).div_(temperature[:, None])


def thresholds(scaled: Tensor, params: DrawParams, full_mass: Tensor | None) -> Tensor:
    """Return the smallest scaled logit that each row keeps.

    min-p comes first (a fraction of the likeliest token's probability, arXiv 2407.01082), then top-k, then top-p (arXiv
    1904.09751) on what those two left.

    Args:
        scaled: [rows, count] candidates' logits from `scale`.
        params: [rows].
        full_mass: [rows] float64, mass of the whole row, for rows that only use top-p; None if there are none.
    """
    ordered = row_sorted(scaled)
    count = ordered.shape[1]
    with np.errstate(divide="ignore"):
        lowest = to_device(np.log(params.min_p).astype(np.float32), scaled)
    if (params.top_k > 0).any():
        places = np.where(params.top_k > 0, np.minimum(params.top_k, count), 1) - 1
        kth = ordered.gather(1, to_device(places, scaled)[:, None])[:, 0]
        used = to_device(params.top_k > 0, scaled)
        lowest = torch.maximum(lowest, torch.where(used, kth, -torch.inf))
    if (params.top_p < 1.0).any():
        mass = ordered.exp().double().masked_fill_(ordered < lowest[:, None], 0.0).cumsum(dim=1)
        total = mass[:, -1]
        if full_mass is not None:
            total = torch.where(torch.isneginf(lowest), full_mass, total)
        wanted = to_device(params.top_p, scaled) * total
        places_p = (mass < wanted[:, None]).sum(dim=1).clamp_(max=count - 1)
        nucleus = ordered.gather(1, places_p[:, None])[:, 0]
        used_p = to_device(params.top_p < 1.0, scaled)
        lowest = torch.maximum(lowest, torch.where(used_p, nucleus, -torch.inf))
    return lowest


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the column that each uniform number falls on. A column of weight 0 is never returned.

    Args:
        weights: [rows, count] float64, not negative, at least one above 0 in each row.
        uniform: [rows] float64 in [0, 1).
    """
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    wanted = uniform[:, None] * total
    column = (cumulative <= wanted).sum(dim=1)
    # Rounding may lift `wanted` to `total`; the last column that raised the sum is then the answer.
    last = (cumulative < total).sum(dim=1)
    return torch.minimum(column, last)


def draw_filtered(logits: Tensor, peaks: Tensor, params: DrawParams, uniform: Tensor) -> Tensor:
    """Draw one token a row from the filtered distribution.

    Args:
        logits: [rows, vocab] float32; -inf marks forbidden tokens.
        peaks: [rows], largest logit, finite.
        params: [rows].
        uniform: [rows] float64.

    Returns:
        [rows] int64 token ids.
    """
    temperature = to_device(params.temperature.astype(np.float32), logits)
    only_top_p = (params.top_p < 1.0) & (params.top_k == 0) & (params.min_p == 0.0)
    mass = row_mass(scale(logits, peaks, temperature)) if only_top_p.any() else None
    found = find_candidates(logits, CANDIDATE_COLUMNS)
    ids, complete = _draw_from(found, peaks, temperature, mass, params, uniform)
    short = np.flatnonzero(~complete.cpu().numpy())
    if short.size:
        rows = to_device(short, logits)
        mass_rows = None if mass is None else mass[rows]
        ids[rows] = _draw_wide(
            logits[rows], peaks[rows], temperature[rows], mass_rows, params.take(short), uniform[rows]
        )
    return ids


def _draw_wide(
    logits: Tensor, peaks: Tensor, temperature: Tensor, mass: Tensor | None, params: DrawParams, uniform: Tensor
) -> Tensor:
    """Draw with the whole vocabulary in view."""
    if logits.device.type != "cpu":
        return _draw_from(all_candidates(logits), peaks, temperature, mass, params, uniform)[0]
    scaled = scale(logits, peaks, temperature)
    full_mass = None if mass is None else mass.numpy()
    return torch.from_numpy(draw_wide_rows(scaled.numpy(), params, full_mass, uniform.numpy()))


def _draw_from(
    found: Candidates, peaks: Tensor, temperature: Tensor, mass: Tensor | None, params: DrawParams, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from candidates; also tell for which rows they were enough."""
    scaled = scale(found.values, peaks, temperature)
    lowest = thresholds(scaled, params, mass)
    # Tokens outside the candidates are at most `bound`: they matter only if the threshold lets one of them in.
    bound = (found.bound - peaks) / temperature
    complete = (lowest > bound) | torch.isneginf(bound)
    weights = scaled.exp().double().masked_fill_(scaled < lowest[:, None], 0.0)
    columns = pick(weights, uniform)
    return found.ids.gather(1, columns[:, None])[:, 0], complete


def draw_plain(logits: Tensor, peaks: Tensor, temperature: npt.NDArray[np.float64], uniform: Tensor) -> Tensor:
    """Draw one token a row from the whole vocabulary: first a block of tokens, then a token of the block.

    Args:
        logits: [rows, vocab] float32; -inf marks forbidden tokens.
        peaks: [rows], largest logit, finite.
        temperature: [rows].
        uniform: [rows] float64.

    Returns:
        [rows] int64 token ids.
    """
    scaled = scale(logits, peaks, to_device(temperature.astype(np.float32), logits))
    weights = fold_columns(scaled.exp_(), SUM_BLOCK_TOKENS, 0.0)
    cumulative = block_sums(weights).cumsum(dim=1)
    total = cumulative[:, -1:]
    wanted = uniform[:, None] * total
    block = torch.minimum((cumulative <= wanted).sum(dim=1), (cumulative < total).sum(dim=1))
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)[:, None])[:, 0], 0.0)
    rows = torch.arange(weights.shape[0], device=weights.device)
    inside = weights.view(weights.shape[0], -1, SUM_BLOCK_TOKENS)[rows, block].double()
    within = inside.cumsum(dim=1)
    rest = wanted - before[:, None]
    column = torch.minimum((within <= rest).sum(dim=1), (within < within[:, -1:]).sum(dim=1))
    return block * SUM_BLOCK_TOKENS + column

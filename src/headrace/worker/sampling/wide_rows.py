"""The draw for rows whose filters keep too many tokens for a few candidates: a flat distribution, or a huge top-k.

On a CPU, row by row in numpy, whose sort is the quickest part of it. Same definition as `filters`. Must not know
requests or slots.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.worker.sampling.draw_params import DrawParams


def draw_wide_rows(
    scaled: npt.NDArray[np.float32],
    params: DrawParams,
    full_mass: npt.NDArray[np.float64] | None,
    uniform: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Draw one token a row.

    Args:
        scaled: [rows, vocab] logits less the row's largest, divided by the temperature.
        params: [rows].
        full_mass: [rows], sum of exp over the row, for rows that only use top-p; None if there are none.
        uniform: [rows] in [0, 1).

    Returns:
        [rows] token ids.
    """
    picked = np.zeros(len(scaled), np.int64)
    for row, values in enumerate(scaled):
        mass = None if full_mass is None else float(full_mass[row])
        lowest = _lowest(values, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]), mass)
        ids = np.flatnonzero(values >= lowest)
        cumulative = np.exp(values[ids]).cumsum(dtype=np.float64)
        column = np.searchsorted(cumulative, uniform[row] * cumulative[-1], side="right")
        last = np.searchsorted(cumulative, cumulative[-1], side="left")
        picked[row] = ids[min(column, last)]
    return picked


def _lowest(
    values: npt.NDArray[np.float32], top_k: int, top_p: float, min_p: float, full_mass: float | None
) -> np.float32:
    """Return the smallest scaled logit that the row keeps."""
    lowest = np.float32(math.log(min_p)) if min_p > 0.0 else np.float32(-np.inf)
    if 0 < top_k < values.size:
        lowest = max(lowest, np.partition(values, values.size - top_k)[values.size - top_k])
    if top_p >= 1.0:
        return lowest
    unfiltered = np.isneginf(lowest)
    kept = values if unfiltered else values[values >= lowest]
    total = full_mass if unfiltered and full_mass is not None else float(np.exp(kept).sum(dtype=np.float64))
    ordered = np.sort(kept)[::-1]
    place = np.searchsorted(np.exp(ordered).cumsum(dtype=np.float64), top_p * total, side="left")
    return max(lowest, ordered[min(int(place), ordered.size - 1)])

"""Log-probabilities of the raw model distribution: before temperature, penalties and filters. Must not sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.types.results import TokenLogprobs
from headrace.worker.sampling.filters import find_candidates
from headrace.worker.sampling.rowwise import row_count_above, row_mass, to_device

MAX_SLICE_POSITIONS = 256
MAX_SLICE_BYTES = 64 << 20


def slice_positions(vocab_tokens: int) -> int:
    """Return how many prompt positions get their logits at once: a few hundred, and few bytes."""
    return max(1, min(MAX_SLICE_POSITIONS, MAX_SLICE_BYTES // (4 * vocab_tokens)))


def position_logprobs(
    raw: Tensor, token_ids: npt.NDArray[np.int64], top_counts: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Return log-probability, rank and likeliest tokens for each row.

    Args:
        raw: [rows, vocab] float32 logits, finite.
        token_ids: [rows] the token that stands at each position.
        top_counts: [rows] how many of the likeliest tokens to return.

    Returns:
        One entry a row. Equal logits are listed in the order of their ids; the rank is 1 + the tokens above.
    """
    if not len(token_ids):
        return []
    peaks = raw.amax(dim=1)
    normaliser = peaks.double() + row_mass(raw - peaks[:, None]).log()
    chosen = raw.gather(1, to_device(token_ids, raw)[:, None])
    ranks = (row_count_above(raw, chosen) + 1).tolist()
    logprobs = (chosen[:, 0].double() - normaliser).tolist()
    most = min(int(top_counts.max()), raw.shape[1])
    if most == 0:
        return [
            TokenLogprobs(token, value, rank, [], [])
            for token, value, rank in zip(token_ids.tolist(), logprobs, ranks, strict=True)
        ]
    top_ids, top_values = _likeliest(raw, most)
    id_rows, value_rows = top_ids.tolist(), (top_values.double() - normaliser[:, None]).tolist()
    return [
        TokenLogprobs(token, value, rank, ids[:count], values[:count])
        for token, value, rank, ids, values, count in zip(
            token_ids.tolist(), logprobs, ranks, id_rows, value_rows, top_counts.tolist(), strict=True
        )
    ]


def _likeliest(raw: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found = find_candidates(raw, count)
    values, order = torch.sort(found.values, dim=1, descending=True, stable=True)
    return found.ids.gather(1, order[:, :count]), values[:, :count]

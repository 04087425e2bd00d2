"""What changes logits before the choice: penalties, bias, allowed tokens, forbidden tokens.

Each function gathers the few entries of all rows that it touches, changes them at once and puts them back: the work
follows the number of entries, not the vocabulary. Must not choose tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.worker.sampling.params_table import ParamsTable
from headrace.worker.sampling.rowwise import to_device


class SeenTokens:
    """Distinct tokens of one sequence, and how often each is in the output. Grows by one token a step."""

    def __init__(self, context_ids: Iterable[int], output_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(context_ids)
        distinct.update(dict.fromkeys(output_ids))
        self._index = {token: place for place, token in enumerate(distinct)}
        self._ids = np.zeros(max(64, 2 * len(distinct)), np.int64)
        self._counts = np.zeros(self._ids.size, np.float32)
        self._ids[: len(distinct)] = list(distinct)
        for token in output_ids:
            self._counts[self._index[token]] += 1.0

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._index.setdefault(token, len(self._index))
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """For each of `ids`, its occurrences in the output."""
        return self._counts[: len(self._index)]


def flat_places(
    rows: Sequence[int], ids: Sequence[npt.NDArray[np.int64]], vocab_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (index into the flattened logits, which of ``rows``) of each id."""
    sizes = [len(part) for part in ids]
    owner = np.repeat(np.arange(len(rows)), sizes)
    places = np.concatenate(ids) + np.asarray(rows, np.int64)[owner] * vocab_tokens
    return places, owner


def apply_penalties(
    logits: Tensor, rows: Sequence[int], seen: Sequence[SeenTokens], slots: npt.NDArray[np.int64], table: ParamsTable
) -> None:
    """Apply repetition, frequency and presence penalties.

    Repetition (CTRL, arXiv 1909.05858): a logit above 0 is divided, another multiplied, for every token of ``seen``.
    Frequency and presence (OpenAI's API reference): ``count * frequency + (count > 0) * presence`` is subtracted.

    Args:
        logits: [rows, vocab] float32, changed in place.
        rows: rows with a penalty.
        seen: their tokens.
        slots: [len(rows)] their slots.
        table: parameters.

    Mutates:
        logits.
    """
    places, owner = flat_places(rows, [tokens.ids for tokens in seen], logits.shape[1])
    if not places.size:
        return
    counts = np.concatenate([tokens.output_counts for tokens in seen])
    owner_slots = slots[owner]
    minus = counts * table.frequency[owner_slots] + (counts > 0) * table.presence[owner_slots]
    index = to_device(places, logits)
    flat = logits.view(-1)
    values = flat[index]
    repetition = to_device(table.repetition[owner_slots], logits)
    values = torch.where(values > 0, values / repetition, values * repetition) - to_device(minus, logits)
    flat[index] = values


def apply_bias(logits: Tensor, rows: Sequence[int], slots: npt.NDArray[np.int64], table: ParamsTable) -> None:
    """Add each row's logit bias.

    Mutates:
        logits.
    """
    biases = [bias for slot in slots.tolist() if (bias := table.bias[slot]) is not None]
    places, _ = flat_places(rows, [bias.ids for bias in biases], logits.shape[1])
    flat = logits.view(-1)
    flat[to_device(places, logits)] += to_device(np.concatenate([bias.values for bias in biases]), logits)


def keep_allowed(logits: Tensor, rows: Sequence[int], slots: npt.NDArray[np.int64], table: ParamsTable) -> None:
    """Forbid every token that is not among a row's allowed ones.

    Mutates:
        logits.
    """
    allowed = [ids for slot in slots.tolist() if (ids := table.allowed[slot]) is not None]
    places, _ = flat_places(rows, allowed, logits.shape[1])
    index = to_device(places, logits)
    flat = logits.view(-1)
    values = flat[index]
    logits[to_device(np.asarray(rows, np.int64), logits)] = -torch.inf
    flat[index] = values


def forbid(logits: Tensor, rows: Sequence[int], ids: Sequence[npt.NDArray[np.int64]]) -> None:
    """Set the logits of some tokens to minus infinity.

    Mutates:
        logits.
    """
    if rows:
        places, _ = flat_places(rows, ids, logits.shape[1])
        logits.view(-1)[to_device(places, logits)] = -torch.inf


def bad_word_endings(sequences: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """Return the tokens that would complete a forbidden sequence.

    Only output tokens count as its beginning: what the prompt says is not an answer.

    Args:
        sequences: forbidden sequences, none empty.
        output_ids: the output so far, or at least the end of it as long as the longest sequence.
    """
    output = list(output_ids)
    endings = []
    for words in sequences:
        before = len(words) - 1
        if before == 0 or (before <= len(output) and output[-before:] == list(words[:-1])):
            endings.append(words[-1])
    return endings

"""The sampler: rows of raw logits in, one token a row out, and log-probabilities where asked for.

A row's answer depends on its own logits, parameters, history and output position only, never on its neighbours. Must
not know plans, models or KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.types.plans import SlotStart
from headrace.types.results import TokenLogprobs
from headrace.worker.sampling.filters import draw_filtered, draw_plain
from headrace.worker.sampling.logprobs import position_logprobs
from headrace.worker.sampling.params_table import ADJUSTING, Feature, ParamsTable
from headrace.worker.sampling.penalties import (
    SeenTokens,
    apply_bias,
    apply_penalties,
    bad_word_endings,
    forbid,
    keep_allowed,
)
from headrace.worker.sampling.randomness import uniforms
from headrace.worker.sampling.rowwise import row_argmax, row_finite, to_device

NON_FINITE = "the model produced NaN or infinite logits for this request"
NOTHING_LEFT = "no token can be sampled: bias, penalties, allowed and forbidden tokens leave none with a finite logit"


class History(Protocol):
    """The output so far of each slot."""

    def output_ids(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the output tokens of a slot."""
        ...


@dataclass
class Sampled:
    """What the sampler chose.

    Attributes:
        token_ids: [rows]; for a failed row a placeholder.
        errors: row -> why it failed.
        logprobs: row -> entry, for rows that asked and did not fail.
    """

    token_ids: npt.NDArray[np.int64]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Per-slot sampling state and the choice of tokens.

    Args:
        slots: rows of the per-slot tables.
        vocab_tokens: width of the logits.
        with_logprobs: False on ranks whose result nobody reads.
    """

    def __init__(self, slots: int, vocab_tokens: int, *, with_logprobs: bool = True) -> None:
        self.table = ParamsTable(slots, vocab_tokens)
        self._seen: list[SeenTokens | None] = [None] * slots
        self._with_logprobs = with_logprobs

    def start(self, start: SlotStart) -> str | None:
        """Set up a slot.

        Returns:
            None, or why this request cannot be sampled.
        """
        slot = start.slot
        problem = self.table.fill(start)
        if self.table.features[slot] & Feature.PENALTIES:
            # Only the repetition penalty looks at the prompt.
            context = start.token_ids if start.sampling.repetition_penalty != 1.0 else ()
            self._seen[slot] = SeenTokens(context, start.token_ids[start.prompt_tokens :])
        return problem

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.table.clear(slot)
        self._seen[slot] = None

    def sample(
        self, logits: Tensor, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], history: History
    ) -> Sampled:
        """Choose one token for each row and count it.

        Args:
            logits: [rows, vocab] float32, contiguous, overwritten.
            slots: [rows].
            positions: [rows] output position of the token to choose, from 0.
            history: output so far, read only by rows with bad words.

        Mutates:
            logits; the token counts of rows with penalties.
        """
        features = self.table.features[slots]
        used = int(np.bitwise_or.reduce(features)) if len(features) else 0
        errors: dict[int, str] = {}
        finite = row_finite(logits)
        if not finite.all():
            _fail(logits, np.flatnonzero(~finite), NON_FINITE, errors)
        asked = _rows_with(features, Feature.LOGPROBS) if used & Feature.LOGPROBS and self._with_logprobs else None
        raw = None if asked is None else logits[to_device(asked, logits)]
        if used & ADJUSTING:
            self._adjust(logits, slots, positions, features, used, history)
        token_ids, peaks = row_argmax(logits)
        usable = np.isfinite(peaks)
        if not usable.all():
            _fail(logits, np.flatnonzero(~usable), NOTHING_LEFT, errors)
            token_ids[~usable], peaks[~usable] = 0, 0.0
        if used & Feature.RANDOM:
            self._draw(logits, slots, positions, features, token_ids, peaks)
        if used & Feature.PENALTIES:
            for row in _rows_with(features, Feature.PENALTIES).tolist():
                self._seen_of(int(slots[row])).add(int(token_ids[row]))
        sampled = Sampled(token_ids, errors)
        if raw is not None and asked is not None:
            entries = position_logprobs(raw, token_ids[asked], self.table.logprobs[slots[asked]])
            pairs = zip(asked.tolist(), entries, strict=True)
            sampled.logprobs = {row: entry for row, entry in pairs if row not in errors}
        return sampled

    def _seen_of(self, slot: int) -> SeenTokens:
        seen = self._seen[slot]
        if seen is None:
            seen = self._seen[slot] = SeenTokens((), ())
        return seen

    def _adjust(
        self,
        logits: Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        features: npt.NDArray[np.int64],
        used: int,
        history: History,
    ) -> None:
        """Apply what changes logits: allowed, forbidden, bias, penalties, in this order."""
        table = self.table
        if used & Feature.ALLOWED:
            rows = _rows_with(features, Feature.ALLOWED)
            keep_allowed(logits, rows.tolist(), slots[rows], table)
        forbidden: dict[int, list[npt.NDArray[np.int64]]] = {}
        if used & Feature.BAD_WORDS:
            for row in _rows_with(features, Feature.BAD_WORDS).tolist():
                slot = int(slots[row])
                longest = max(map(len, table.bad_words[slot]), default=0)
                tail = history.output_ids(slot)[-longest:].tolist()
                endings = bad_word_endings(table.bad_words[slot], tail)
                if endings:
                    forbidden.setdefault(row, []).append(np.array(endings, np.int64))
        if used & Feature.MIN_TOKENS:
            for row in _rows_with(features, Feature.MIN_TOKENS).tolist():
                stops = table.early_stops[int(slots[row])]
                if stops is not None and positions[row] < table.min_tokens[slots[row]]:
                    forbidden.setdefault(row, []).append(stops)
        forbid(logits, list(forbidden), [np.concatenate(parts) for parts in forbidden.values()])
        if used & Feature.BIAS:
            rows = _rows_with(features, Feature.BIAS)
            apply_bias(logits, rows.tolist(), slots[rows], table)
        if used & Feature.PENALTIES:
            rows = _rows_with(features, Feature.PENALTIES)
            seen = [self._seen_of(slot) for slot in slots[rows].tolist()]
            apply_penalties(logits, rows.tolist(), seen, slots[rows], table)

    def _draw(
        self,
        logits: Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        features: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
        peaks: npt.NDArray[np.float32],
    ) -> None:
        """Replace the argmax of random rows by a draw."""
        random = (features & Feature.RANDOM) != 0
        filtered = (features & Feature.FILTERED) != 0
        for rows, draw_is_filtered in (
            (np.flatnonzero(random & ~filtered), False),
            (np.flatnonzero(random & filtered), True),
        ):
            if not rows.size:
                continue
            part = logits if rows.size == len(features) else logits[to_device(rows, logits)]
            part_peaks = to_device(peaks[rows], logits)
            row_slots = slots[rows]
            uniform = to_device(uniforms(self.table.seeds[row_slots], positions[rows]), logits)
            if draw_is_filtered:
                picked = draw_filtered(part, part_peaks, self.table.draw_params(row_slots), uniform)
            else:
                picked = draw_plain(part, part_peaks, self.table.temperature[row_slots], uniform)
            token_ids[rows] = picked.cpu().numpy()


def _rows_with(features: npt.NDArray[np.int64], feature: Feature) -> npt.NDArray[np.int64]:
    return np.flatnonzero(features & int(feature))


def _fail(logits: Tensor, rows: npt.NDArray[np.int64], why: str, errors: dict[int, str]) -> None:
    """Record failed rows and give them harmless logits, so that the rest of the step needs no special case."""
    for row in rows.tolist():
        errors.setdefault(row, why)
    logits[torch.from_numpy(rows).to(logits.device)] = 0.0

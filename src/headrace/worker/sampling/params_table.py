"""Sampling parameters of all slots as columns: row = slot, so that a step gathers what its rows need at once.

Filled when a request takes its slot and never touched in a step. Must not know logits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.types.plans import SlotStart
from headrace.types.sampling import SamplingParams
from headrace.worker.sampling.draw_params import DrawParams
from headrace.worker.sampling.randomness import fold_seed

MIN_TEMPERATURE = 1e-6
"""A temperature below this samples like greedy; 32-bit floats could not divide by much less."""


class Feature(enum.IntFlag):
    """What a slot's sampling needs beside an argmax."""

    RANDOM = 1
    FILTERED = 2
    PENALTIES = 4
    BIAS = 8
    ALLOWED = 16
    BAD_WORDS = 32
    MIN_TOKENS = 64
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256


ADJUSTING = Feature.PENALTIES | Feature.BIAS | Feature.ALLOWED | Feature.BAD_WORDS | Feature.MIN_TOKENS


@dataclass(frozen=True)
class TokenValues:
    """Token ids with a number each."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class ParamsTable:
    """Columns of sampling parameters.

    Attributes:
        features: [slots] bits of `Feature`; 0 is plain greedy.
        bias: per slot, token ids and what is added to their logits.
        allowed: per slot, the only tokens that may be sampled.
        bad_words: per slot, forbidden sequences.
        early_stops: per slot, tokens that may not come before ``min_tokens``.
    """

    def __init__(self, slots: int, vocab_tokens: int) -> None:
        self._vocab_tokens = vocab_tokens
        self.features = np.zeros(slots, np.int64)
        self.temperature = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self.repetition = np.ones(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.seeds = np.zeros(slots, np.uint64)
        self.min_tokens = np.zeros(slots, np.int64)
        self.logprobs = np.zeros(slots, np.int64)
        self.prompt_logprobs = np.zeros(slots, np.int64)
        self.bias: list[TokenValues | None] = [None] * slots
        self.allowed: list[npt.NDArray[np.int64] | None] = [None] * slots
        self.bad_words: list[list[list[int]]] = [[] for _ in range(slots)]
        self.early_stops: list[npt.NDArray[np.int64] | None] = [None] * slots

    def clear(self, slot: int) -> None:
        """Make a slot plain greedy."""
        self.features[slot] = 0
        self.bias[slot] = self.allowed[slot] = self.early_stops[slot] = None
        self.bad_words[slot] = []

    def fill(self, start: SlotStart) -> str | None:
        """Set the row of a slot.

        Returns:
            None, or why this request cannot be sampled; its row is then plain greedy.
        """
        self.clear(start.slot)
        problem = self._problem(start)
        if problem is not None:
            return problem
        slot, params = start.slot, start.sampling
        features = self._fill_distribution(slot, params) | self._fill_adjustments(slot, start)
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
            self.logprobs[slot] = params.logprobs
        if params.prompt_logprobs is not None:
            features |= Feature.PROMPT_LOGPROBS
            self.prompt_logprobs[slot] = params.prompt_logprobs
        self.features[slot] = int(features)
        return None

    def _fill_distribution(self, slot: int, params: SamplingParams) -> Feature:
        if params.greedy:
            return Feature(0)
        self.temperature[slot] = max(params.temperature, MIN_TEMPERATURE)
        self.top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_tokens else 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = fold_seed(params.seed or 0)
        filtered = self.top_k[slot] > 0 or params.top_p < 1.0 or params.min_p > 0.0
        return Feature.RANDOM | Feature.FILTERED if filtered else Feature.RANDOM

    def _fill_adjustments(self, slot: int, start: SlotStart) -> Feature:
        params, features = start.sampling, Feature(0)
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            features |= Feature.PENALTIES
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
            with np.errstate(over="ignore"):
                values = np.fromiter(params.logit_bias.values(), np.float64, ids.size).astype(np.float32)
            self.bias[slot] = TokenValues(ids, values)
            features |= Feature.BIAS
        if params.allowed_token_ids is not None:
            self.allowed[slot] = np.unique(np.asarray(params.allowed_token_ids, np.int64))
            features |= Feature.ALLOWED
        if start.bad_words_token_ids:
            self.bad_words[slot] = [list(words) for words in start.bad_words_token_ids if words]
            features |= Feature.BAD_WORDS
        # With ignore_eos an EOS ends nothing, so it may come at any time.
        eos = [] if params.ignore_eos else [token for token in start.eos_token_ids if 0 <= token < self._vocab_tokens]
        stops = set(params.stop_token_ids) | set(eos)
        if params.min_tokens > 0 and stops:
            self.min_tokens[slot] = params.min_tokens
            self.early_stops[slot] = np.array(sorted(stops), np.int64)
            features |= Feature.MIN_TOKENS
        return features

    def draw_params(self, slots: npt.NDArray[np.int64]) -> DrawParams:
        """Return the distribution parameters of some slots."""
        return DrawParams(self.temperature[slots], self.top_k[slots], self.top_p[slots], self.min_p[slots])

    def _problem(self, start: SlotStart) -> str | None:
        params = start.sampling
        if not params.greedy and params.seed is None:
            return "sampling.seed is not set; whoever makes the request must draw one"
        checks: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("bad_words", (token for words in start.bad_words_token_ids for token in words)),
        )
        for name, ids in checks:
            for token in ids:
                if not 0 <= token < self._vocab_tokens:
                    return f"{name}: token id {token} is outside the vocabulary of {self._vocab_tokens} tokens"
        return None

"""A slow sampler for one row, in plain Python and float64, written from the definitions. The oracle of the tests."""

from __future__ import annotations

import math

import numpy as np

from headrace.base.ids import RequestId, Slot
from headrace.types.plans import SlotStart
from headrace.types.sampling import SamplingParams

MASK = (1 << 64) - 1


def splitmix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int) -> float:
    key = splitmix((seed + 0x9E3779B97F4A7C15) & MASK)
    return (splitmix((key + (position + 1) * 0xD1342543DE82EF95) & MASK) >> 11) * 2.0**-53


def adjusted(logits: np.ndarray, params: SamplingParams, prompt, output, eos=(), bad_words=()) -> np.ndarray:
    """Return float32 logits after allowed, forbidden, bias and penalties."""
    row = logits.astype(np.float32).copy()
    vocab = row.size
    if params.allowed_token_ids is not None:
        row[[token for token in range(vocab) if token not in params.allowed_token_ids]] = -np.inf
    for words in bad_words:
        before = list(words[:-1])
        if not before or list(output)[-len(before) :] == before:
            row[words[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else eos)]:
            row[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += np.float32(bias)
    for token in range(vocab):
        if params.repetition_penalty != 1.0 and token in {*prompt, *output}:
            penalty = np.float32(params.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        count = list(output).count(token)
        row[token] -= np.float32(
            count * np.float32(params.frequency_penalty) + (count > 0) * np.float32(params.presence_penalty)
        )
    return row


def distribution(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return float64 probabilities after temperature, min-p, top-k and top-p; equal logits stay or go together."""
    scaled = ((row - row.max()) / np.float32(max(params.temperature, 1e-6))).astype(np.float32)
    weights = np.array([math.exp(value) for value in scaled.astype(np.float64)])
    keep = np.ones(row.size, bool)
    if params.min_p > 0:
        keep &= scaled >= np.float32(math.log(params.min_p))
    if 0 < params.top_k < row.size:
        keep &= scaled >= sorted(scaled, reverse=True)[params.top_k - 1]
    weights[~keep] = 0.0
    if params.top_p < 1.0:
        total, mass = weights.sum(), 0.0
        for token in sorted(range(row.size), key=lambda token: -scaled[token]):
            mass += weights[token]
            if mass >= params.top_p * total:
                weights[scaled < scaled[token]] = 0.0
                break
    return weights / weights.sum()


def choices(row: np.ndarray, params: SamplingParams, position: int, slack: float = 1e-5) -> set[int]:
    """Return the tokens that a correct sampler may choose; more than one only where rounding decides."""
    if params.temperature == 0.0:
        return {int(np.argmax(row))}
    probabilities = distribution(row, params)
    point, low = uniform(params.seed & MASK, position), 0.0
    found = set()
    for token, probability in enumerate(probabilities):
        if probability > 0.0 and low - slack <= point < low + probability + slack:
            found.add(token)
        low += probability
    return found


def slot_start(
    slot: int, sampling: SamplingParams, prompt=(1, 2, 3), output=(), eos=(), bad_words=(), blocks=((),)
) -> SlotStart:
    return SlotStart(
        slot=Slot(slot),
        request_id=RequestId(f"request-{slot}"),
        token_ids=[*prompt, *output],
        prompt_tokens=len(prompt),
        computed_tokens=0,
        blocks=[list(table) for table in blocks],
        sampling=sampling,
        eos_token_ids=list(eos),
        bad_words_token_ids=[list(words) for words in bad_words],
    )

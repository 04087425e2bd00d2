"""What the worker answers to one plan."""

from __future__ import annotations

import msgspec

from headrace.base.ids import StepId


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position (natural logarithm, of the raw model distribution).

    Attributes:
        token_id: the token that stands there (sampled, or of the prompt).
        logprob: its log-probability.
        rank: 1 for the likeliest.
        top_ids: the likeliest tokens, best first.
        top_logprobs: theirs.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of one row of the plan.

    Attributes:
        token_ids: sampled tokens: one if the row asked for a sample and succeeded, else none; with drafts one to
            ``drafts + 1``.
        logprobs: one entry for each sampled token, or None if not asked for.
        prompt_logprobs: entries for prompt positions ``start+1 .. start+tokens`` as far as they are prompt tokens, or
            None if not asked for. Position 0 has no entry.
        error: None, or why this row (alone) failed; the scheduler ends this request with a `NumericalError`.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Results of one plan.

    Attributes:
        step: of the plan.
        rows: aligned with ``StepPlan.rows``.
        decode_tokens: the sampled token of each of ``StepPlan.decodes``; any number for one that failed.
        decode_errors: (index into ``StepPlan.decodes``, why) of those that failed.
    """

    step: StepId
    rows: list[RowResult]
    decode_tokens: list[int] = []
    decode_errors: list[tuple[int, str]] = []

"""News about a request for the front end, made from one row's result.

Must not change queues, blocks or slots.
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError
from headrace.sched.request import Request
from headrace.types.error_records import record_of
from headrace.types.outputs import ErrorRecord, FinishReason, RequestDelta
from headrace.types.plans import PlanRow
from headrace.types.requests import EngineRequest
from headrace.types.results import RowResult, TokenLogprobs


def refusal_delta(source: EngineRequest, error: HeadraceError) -> RequestDelta:
    """Return the only delta of a refused request."""
    return RequestDelta(request_id=source.request_id, finish_reason=FinishReason.ERROR, error=record_of(error))


def end_delta(
    request: Request, reason: FinishReason, stop_token_id: int | None, error: ErrorRecord | None
) -> RequestDelta:
    """Return the last delta of a request that ends without a new token.

    Mutates: ``request.delta_sent``.
    """
    return RequestDelta(
        request_id=request.request_id,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        cached_tokens=request.cached_tokens,
        error=error,
        first_scheduled_s=_first_scheduled_s(request),
        preemptions=request.preemptions,
    )


def token_delta(request: Request, token_id: int, finish: tuple[FinishReason, int | None] | None) -> RequestDelta:
    """Return the delta for a decode that has more to say than its token.

    Args:
        request: its new token has been added already.
        token_id: the token.
        finish: reason and stop token, if the new token ends the request.

    Mutates: ``request.delta_sent``.
    """
    reason, stop_token_id = finish or (None, None)
    return RequestDelta(
        request_id=request.request_id,
        new_token_ids=[token_id],
        finish_reason=reason,
        stop_token_id=stop_token_id,
        cached_tokens=request.cached_tokens,
        first_scheduled_s=_first_scheduled_s(request),
        preemptions=request.preemptions,
    )


def row_delta(
    request: Request, row: PlanRow, answer: RowResult, finish: tuple[FinishReason, int | None] | None
) -> RequestDelta:
    """Return the delta for one successful row.

    Args:
        request: owner of the row; its new token has been added already.
        row: of the plan.
        answer: its result.
        finish: reason and stop token, if the new token ends the request.

    Mutates: ``request`` (what has been sent).
    """
    if finish is None and request.delta_sent and answer.logprobs is None and answer.prompt_logprobs is None:
        # Nearly all deltas; the rest of this function costs more than the struct.
        return RequestDelta(
            request_id=request.request_id,
            new_token_ids=answer.token_ids,
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
        )
    reason, stop_token_id = finish or (None, None)
    return RequestDelta(
        request_id=request.request_id,
        new_token_ids=answer.token_ids,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        logprobs=answer.logprobs,
        prompt_logprobs=_prompt_logprobs(request, row, answer) if answer.prompt_logprobs else None,
        cached_tokens=request.cached_tokens,
        first_scheduled_s=_first_scheduled_s(request),
        preemptions=request.preemptions,
    )


def _first_scheduled_s(request: Request) -> float | None:
    if request.delta_sent:
        return None
    request.delta_sent = True
    request.news_at_tokens = request.limit_tokens
    return request.first_scheduled_s


def _prompt_logprobs(request: Request, row: PlanRow, answer: RowResult) -> list[TokenLogprobs] | None:
    """Return the entries not sent before: after a preemption the prompt is computed, and reported, again."""
    entries = answer.prompt_logprobs or []
    fresh = entries[max(0, request.prompt_logprobs_sent - row.start) :]
    request.prompt_logprobs_sent = max(request.prompt_logprobs_sent, row.start + len(entries))
    return fresh or None

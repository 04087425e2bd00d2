"""What the engine core sends to the front end."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import msgspec

from headrace.base.ids import RequestId
from headrace.types.results import TokenLogprobs


class FinishReason(enum.IntEnum):
    """Why a request ended. The numbers are part of the wire format; new ones only at the end."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    @property
    def text(self) -> str:
        """Name in API answers."""
        return self.name.lower()


class ErrorRecord(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses a process boundary; fields as in `headrace.base.errors.HeadraceError`."""

    code: str
    kind: str
    message: str
    http_status: int
    retryable: bool
    param: str | None = None


class RequestDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """News about one request after one step.

    Attributes:
        request_id: whose.
        new_token_ids: tokens sampled in this step (a stop token that ended the request is included).
        finish_reason: set on the last delta of a request, exactly once.
        stop_token_id: the EOS or stop token that ended it, if one did.
        logprobs: for ``new_token_ids``, if asked for.
        prompt_logprobs: for prompt positions covered in this step, if asked for.
        cached_tokens: prompt tokens taken from the prefix cache at the first start.
        error: set if ``finish_reason`` is ERROR.
        first_scheduled_s: monotonic seconds when it first got a slot, sent with the first delta.
        preemptions: how often it has been preempted so far.
    """

    request_id: RequestId
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: ErrorRecord | None = None
    first_scheduled_s: float | None = None
    preemptions: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """State and running totals of the scheduler; plain numbers, no metrics library.

    ``running`` and ``waiting`` are requests; blocks leave the null block out: free (cached ones included) + used =
    total. The ``waiting_`` fields say for what some of the waiting wait: their grammar, a request with the same prompt,
    their tenant's quota, the answer of an outside store, a load or a slot after one.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    step_s: float = 0.0
    quota_skips: int = 0
    timeouts: int = 0
    checkpoints: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    waiting_grammar: int = 0
    waiting_leader: int = 0
    waiting_quota: int = 0
    waiting_lookup: int = 0
    waiting_load: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    encoder_rows_used: int = 0
    encoder_rows_resident: int = 0
    reserve_share: float = 0.0


class StepNews(msgspec.Struct, frozen=True, array_like=True):
    """What one applied step has to say.

    Attributes:
        request_ids: requests with exactly one new token and no other news; most of most steps.
        token_ids: that token, aligned with ``request_ids``.
        deltas: news of all other requests. A request is in one of the two, once.
    """

    request_ids: list[RequestId]
    token_ids: list[int]
    deltas: list[RequestDelta]

    def each(self) -> Iterator[RequestDelta]:
        """Yield all news as deltas, one a request."""
        return each_delta(self.deltas, self.request_ids, self.token_ids)


def each_delta(
    deltas: Sequence[RequestDelta], request_ids: Sequence[RequestId], token_ids: Sequence[int]
) -> Iterator[RequestDelta]:
    """Yield deltas, and then a delta for each of the requests that have one new token and no other news."""
    yield from deltas
    for request_id, token_id in zip(request_ids, token_ids, strict=True):
        yield RequestDelta(request_id=request_id, new_token_ids=[token_id])

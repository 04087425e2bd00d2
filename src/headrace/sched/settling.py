"""Results become progress and news: tokens are taken, blocks published and freed, requests ended.

Progress is settled with the plan that produced the result, never with what has been planned since. Must not plan.
"""

from __future__ import annotations

import msgspec

from headrace.base.errors import InvariantError, NumericalError
from headrace.base.ids import RequestId
from headrace.sched.deltas import end_delta, row_delta, token_delta
from headrace.sched.draft import Flight
from headrace.sched.request import Request, RequestState
from headrace.sched.roster import Roster
from headrace.sched.stop import finish_of
from headrace.types.error_records import record_of
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.plans import PlanRow
from headrace.types.results import RowResult, StepResult


class SettlingPass:
    """Applies results."""

    def __init__(self, roster: Roster) -> None:
        """Keep the roster.

        Args:
            roster: requests and memory.
        """
        self._roster = roster
        self._kv = roster.kv

    def apply_decodes(
        self, flight: Flight, result: StepResult, deltas: list[RequestDelta]
    ) -> tuple[list[RequestId], list[int]]:
        """Settle the decodes; return the requests that have one new token and no other news, and these tokens.

        The other half of the hot loop, beside `RunningPass.plan_decodes`.

        Mutates: requests, blocks, ``deltas``.
        """
        for index, why in result.decode_errors:
            if flight.decoding[index].state is not RequestState.FINISHED:
                deltas.append(self._fail(flight.decoding[index], why))
        dropped = 0
        # Who does not belong into the columns; mostly nobody.
        apart: set[RequestId] = set()
        lost, finished, advance = flight.preempted_ids, RequestState.FINISHED, self._kv.advance
        for request, token in zip(flight.decoding, result.decode_tokens, strict=True):
            if request.state is finished:
                apart.add(request.request_id)
                dropped += 1
                continue
            known_ids = request.token_ids
            # A request preempted since then owns no KV any more; its sample is as good as ever.
            if not lost or request.request_id not in lost:
                request.computed_tokens = computed_tokens = request.computed_tokens + 1
                if computed_tokens >= request.kv.advance_at_tokens:
                    advance(request.kv, known_ids, computed_tokens)
            known_ids.append(token)
            if len(known_ids) >= request.news_at_tokens or token in request.stop_token_ids:
                apart.add(request.request_id)
                deltas.append(token_delta(request, token, self._end_of(request)))
        self._roster.totals.generation_tokens += len(flight.decoding) - dropped
        if not apart:
            return [request.request_id for request in flight.decoding], result.decode_tokens
        pairs = zip(flight.decoding, result.decode_tokens, strict=True)
        told = [(request.request_id, token) for request, token in pairs if request.request_id not in apart]
        return [request_id for request_id, _ in told], [token for _, token in told]

    def apply_rows(self, flight: Flight, result: StepResult, deltas: list[RequestDelta]) -> None:
        """Settle the rows.

        Mutates: requests, blocks, ``deltas``.
        """
        lost, finished = flight.preempted_ids, RequestState.FINISHED
        for request, row, answer in zip(flight.requests, flight.plan.rows, result.rows, strict=True):
            if request.state is finished:
                continue
            if answer.error is not None:
                deltas.append(self._fail(request, answer.error))
                continue
            _check_samples(request, row, answer)
            holds_blocks = not lost or request.request_id not in lost
            if row.drafts:
                deltas.append(self._settle_drafts(request, row, answer, holds_blocks))
                continue
            if holds_blocks:
                self._progress(request, row.start + row.tokens)
            if row.sample:
                self._roster.totals.generation_tokens += 1
                request.token_ids.append(answer.token_ids[0])
                deltas.append(row_delta(request, row, answer, self._end_of(request)))
            elif answer.prompt_logprobs:
                deltas.append(row_delta(request, row, answer, None))

    def _progress(self, request: Request, computed_tokens: int) -> None:
        """Count applied tokens, publish what is complete, and give up encoder outputs that the request has passed."""
        request.computed_tokens = computed_tokens
        if computed_tokens >= request.kv.advance_at_tokens:
            self._kv.advance(request.kv, request.token_ids, computed_tokens)
        if request.source.media and self._roster.encoder is not None and not request.plain:
            encoder = self._roster.encoder
            encoder.advance(request.request_id, request.source.media, computed_tokens)
            done = computed_tokens >= request.prompt_tokens and not encoder.cache.uses_of(request.request_id)
            request.plain = request.plain_decodes and done

    def _settle_drafts(self, request: Request, row: PlanRow, answer: RowResult, holds_blocks: bool) -> RequestDelta:
        """Take the samples of a row with drafts as far as the request goes; the KV behind them is void.

        Samples 1 to n mean that n - 1 drafts hold. What was planned counted all of them; it is set back here.
        """
        finish = None
        taken = 0
        for token in answer.token_ids:
            request.token_ids.append(token)
            taken += 1
            finish = finish_of(request)
            if finish is not None:
                break
        # One sample was counted when the row was planned.
        request.known_tokens += taken - 1
        totals = self._roster.totals
        totals.generation_tokens += taken
        totals.draft_tokens += row.drafts
        totals.accepted_tokens += taken - 1
        if holds_blocks:
            request.planned_tokens = row.start + row.tokens - row.drafts + taken - 1
            self._progress(request, request.planned_tokens)
        if finish is not None:
            self._roster.finish(request)
        if taken < len(answer.token_ids):
            logprobs = answer.logprobs[:taken] if answer.logprobs is not None else None
            answer = msgspec.structs.replace(answer, token_ids=answer.token_ids[:taken], logprobs=logprobs)
        return row_delta(request, row, answer, finish)

    def _end_of(self, request: Request) -> tuple[FinishReason, int | None] | None:
        """Finish a request if its last token ends it; return reason and stop token."""
        known_ids = request.token_ids
        if known_ids[-1] not in request.stop_token_ids and len(known_ids) < request.limit_tokens:
            return None
        finish = finish_of(request)
        if finish is not None:
            self._roster.finish(request)
        return finish

    def _fail(self, request: Request, reason: str) -> RequestDelta:
        """End a request whose row failed. What it has computed may be broken, so nobody may hit it."""
        self._kv.forget(request.kv, [holder.kv for holder in self._roster.holders()])
        if self._roster.encoder is not None and request.source.media:
            self._roster.encoder.distrust(request.request_id, request.source.media)
        self._roster.finish(request)
        error = record_of(NumericalError(f"the model's output for this request is not usable: {reason}"))
        return end_delta(request, FinishReason.ERROR, None, error)


def _check_samples(request: Request, row: PlanRow, answer: RowResult) -> None:
    """Refuse an answer with another number of samples than the row asks for: the worker is broken, not the request."""
    count = len(answer.token_ids)
    if not row.sample <= count <= (row.drafts + 1 if row.sample else 0):
        wanted = f"1 to {row.drafts + 1}" if row.drafts else str(int(row.sample))
        raise InvariantError(f"{request.request_id}: {count} tokens sampled where {wanted} were asked for")

"""Events from outside become requests, moves and ends, in order and once a step.

A stale event is judged by where its request is now, never by when it comes. Must not plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.base.errors import HeadraceError, OverloadedError, RequestError
from headrace.kv.prefix_hash import extras_of
from headrace.sched.admission import Limits, check_request, limit_tokens
from headrace.sched.deadlines import timeout_error
from headrace.sched.deltas import end_delta, refusal_delta
from headrace.sched.gates import follows
from headrace.sched.queues import order_key
from headrace.sched.request import Request, RequestState
from headrace.sched.roster import Roster
from headrace.sched.stop import finish_of
from headrace.types.error_records import record_of
from headrace.types.events import (
    AbortRequest,
    AddRequest,
    GrammarReady,
    InboxEvent,
    JobDone,
    LookupDone,
    ResetPrefixCache,
)
from headrace.types.outputs import ErrorRecord, FinishReason
from headrace.types.requests import EngineRequest


class Door:
    """Takes the inbox, and what time alone brings about."""

    def __init__(self, roster: Roster, limits: Limits, forget: Callable[[Request], None]) -> None:
        """Keep what it needs.

        Args:
            roster: requests and memory.
            limits: what a request may ask for.
            forget: is told of every request that ends here.
        """
        self._roster = roster
        self._limits = limits
        self._forget = forget
        self._entered = 0

    def take(self, inbox: Sequence[InboxEvent]) -> None:
        """Take the events in order.

        Mutates: requests, queues, blocks, caches.
        """
        for event in inbox:
            if isinstance(event, AddRequest):
                self._add(event.request)
            elif isinstance(event, AbortRequest):
                request = self._roster.requests.get(event.request_id)
                if request is not None:
                    self._end(request)
            elif isinstance(event, GrammarReady):
                self._grammar_ready(event)
            elif isinstance(event, LookupDone):
                if self._roster.remote is not None:
                    self._roster.remote.lookup_done(event)
                    self._roster.gates.store_answered(event.request_id)
            elif isinstance(event, JobDone):
                self._job_done(event)
            elif isinstance(event, ResetPrefixCache):
                self._roster.kv.forget_idle()

    def let_time_pass(self, now_s: float) -> None:
        """End what is over by now: loads, requests, look-ups.

        Args:
            now_s: monotonic seconds.

        Mutates: requests, queues, blocks.
        """
        roster = self._roster
        if roster.remote is not None:
            late = roster.remote.expire(now_s)
            for request in late:
                self._send_back(request)
            if late:
                roster.gates.load_ended()
            for request_id in roster.gates.lookups_late(now_s):
                roster.remote.lookup_late(request_id)
        for request_id in roster.deadlines.due(now_s):
            request = roster.requests[request_id]
            roster.totals.timeouts += 1
            self._end(request, record_of(timeout_error(request)))

    def _add(self, source: EngineRequest) -> None:
        roster = self._roster
        try:
            self._check(source)
        except HeadraceError as error:
            roster.news.append(refusal_delta(source, error))
            return
        config = roster.config
        request = Request(
            source,
            order_key=order_key(source, config.policy, config.priority_ageing_s, self._entered),
            limit_tokens=limit_tokens(source, self._limits.max_model_len),
            kv=roster.kv.new_sequence(
                extras=extras_of(source),
                hashes=source.block_hashes,
                prompt_tokens=len(source.prompt_token_ids),
                encoder_tokens=source.encoder_tokens,
            ),
            speculative=config.speculative_tokens > 0,
        )
        self._entered += 1
        roster.requests[request.request_id] = request
        if source.deadline_s is not None:
            roster.deadlines.add(request.request_id, source.deadline_s)
        roster.gates.enter(request, self._leader_of(request))
        # A resubmitted request may have produced its last token before the core died.
        finish = finish_of(request) if source.produced_token_ids else None
        if finish is not None:
            roster.news.append(end_delta(request, *finish, error=None))
            self._end(request)

    def _check(self, source: EngineRequest) -> None:
        roster, config = self._roster, self._roster.config
        if source.request_id in roster.requests:
            raise RequestError(f"request id {source.request_id!r} is in use", param="request_id")
        # Free slots count as room in the queue, so that max_queue 1 does not refuse what could run at once.
        most_requests = config.max_queue + config.max_num_seqs
        if len(roster.requests) >= most_requests:
            running = len(roster.running)
            raise OverloadedError(
                f"{running} requests run and {len(roster.requests) - running} wait, which is the limit "
                f"(--max-num-seqs {config.max_num_seqs}, --max-queue {config.max_queue}): retry later"
            )
        check_request(source, self._limits)
        if source.media:
            self._limits.check_media(source, roster.encoder)

    def _leader_of(self, request: Request) -> Request | None:
        leader_id = request.source.leader_id
        leader = self._roster.requests.get(leader_id) if leader_id is not None else None
        return leader if follows(request, leader, self._roster.kv.hash_tokens) else None

    def _grammar_ready(self, event: GrammarReady) -> None:
        request = self._roster.requests.get(event.request_id)
        if request is None or request.state is not RequestState.GRAMMAR:
            return
        if event.error is not None:
            self._end(request, event.error)
        else:
            self._roster.gates.enter(request, self._leader_of(request))

    def _job_done(self, event: JobDone) -> None:
        remote = self._roster.remote
        if remote is None:
            return
        arrival = remote.job_done(event)
        if arrival is not None and arrival.tokens:
            arrival.request.move_to(RequestState.ARRIVED)
            arrival.request.planned_tokens = arrival.request.computed_tokens = arrival.tokens
        elif arrival is not None:
            self._send_back(arrival.request)
        self._roster.gates.load_ended()

    def _send_back(self, request: Request) -> None:
        """A load has come to nothing: the request waits again, like any other."""
        request.move_to(RequestState.WAITING)
        request.restart()
        self._roster.queue.push(request)
        self._roster.gates.tenant_released(request.source.tenant)

    def _end(self, request: Request, error: ErrorRecord | None = None) -> None:
        if error is not None:
            self._roster.news.append(end_delta(request, FinishReason.ERROR, None, error))
        self._roster.finish(request)
        self._forget(request)

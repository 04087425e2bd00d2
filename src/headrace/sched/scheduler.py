"""Continuous batching with a token budget: running requests first, decodes before prefills, then waiting ones.

There are no phases: each step, a request computes some of the tokens that are known and not yet computed. Progress is
counted when a step is planned, and settled when its result is applied, so that a second step can be planned in
between. Must not look at a clock, at token texts, or at the device.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from headrace.base.errors import (
    ConfigError,
    HeadraceError,
    InvariantError,
    NumericalError,
    OverloadedError,
    RequestError,
    invariant,
)
from headrace.base.ids import RequestId, Slot, StepId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import capacity_tokens
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.events import KvEvent
from headrace.kv.prefix_hash import extras_of
from headrace.kv.sequence import Hit
from headrace.sched.admission import check_request, limit_tokens
from headrace.sched.deltas import end_delta, refusal_delta, row_delta, token_delta
from headrace.sched.draft import Flight, StepDraft, owned_slot
from headrace.sched.queues import POLICIES, WaitingQueue, order_key
from headrace.sched.request import Request, RequestState
from headrace.sched.stop import finish_of
from headrace.sched.totals import Totals
from headrace.types.cache_specs import KvLayout
from headrace.types.error_records import record_of
from headrace.types.events import AbortRequest, AddRequest, InboxEvent
from headrace.types.outputs import FinishReason, RequestDelta, SchedulerStats, StepNews
from headrace.types.plans import BlockAppend, PlanRow, StepPlan
from headrace.types.requests import EngineRequest
from headrace.types.results import RowResult, StepResult


class Scheduler:
    """Decides what each step computes, and turns results into news for the front end.

    The caller alternates `schedule` and `apply`, or plans one step ahead (``steps_in_flight`` 2), and applies every
    plan, empty ones included, in order. Plans must be executed in order: a block freed here may be handed out by a
    later plan while an earlier one still writes to it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        layout: KvLayout,
        max_model_len: int,
        enable_prefix_caching: bool,
        hash_seed: str = "",
        record_events: bool = False,
    ) -> None:
        """Make an idle scheduler.

        Args:
            config: limits and policy.
            layout: groups and blocks of the KV cache.
            max_model_len: longest prompt + output in tokens.
            enable_prefix_caching: reuse the KV of common beginnings.
            hash_seed: start of the prefix hashes, the same as in the front end.
            record_events: keep cache events for `take_events`; without a taker they would pile up.

        Raises:
            ConfigError: limits that would let a running request starve, or an unknown policy.
        """
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}",
                param="max_num_batched_tokens",
            )
        if config.policy not in POLICIES:
            raise ConfigError(f"policy {config.policy!r} is not one of {', '.join(POLICIES)}", param="policy")
        self._config = config
        self._layout = layout
        self._max_model_len = max_model_len
        self._capacity_tokens = capacity_tokens(layout)
        self.kv = KvCoordinator(
            layout,
            enable_prefix_caching=enable_prefix_caching,
            batch_tokens=config.max_num_batched_tokens,
            steps_in_flight=config.steps_in_flight,
            hash_seed=hash_seed,
            record_events=record_events,
        )
        self._watermark_blocks = [int(config.watermark * group.pool.total_blocks) for group in self.kv.groups]
        self._requests: dict[RequestId, Request] = {}
        self._running: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue()
        self._free_slots: list[Slot] = [Slot(slot) for slot in range(config.max_num_seqs)]
        self._releases: list[Slot] = []
        self._refusals: list[RequestDelta] = []
        self._flights: deque[Flight] = deque()
        self._steps = 0
        self._entered = 0
        # The head of the queue at its last look-up, if it did not fit, and the blocks per group that it asked for.
        self._blocked: tuple[Request, list[int]] | None = None
        self._totals = Totals()

    @property
    def has_work(self) -> bool:
        """True if another step has something to do: requests, slots to release, or refusals to report."""
        return bool(self._requests or self._releases or self._refusals)

    @property
    def hash_block_tokens(self) -> int:
        """Tokens under one prefix hash, for those who compute ``EngineRequest.block_hashes``."""
        return self.kv.hash_tokens

    @property
    def running(self) -> list[Request]:
        """Requests that own a slot and blocks; to look at, not to change."""
        return list(self._running.values())

    @property
    def waiting(self) -> list[Request]:
        """Requests without a slot, in the order in which they may start; to look at, not to change."""
        return self._waiting.requests()

    def stats(self) -> SchedulerStats:
        """Return state and running totals. Blocks are summed over the groups."""
        pools = [group.pool for group in self.kv.groups]
        return SchedulerStats(
            step=self._steps,
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=sum(pool.total_blocks for pool in pools),
            blocks_free=sum(pool.free_blocks for pool in pools),
            blocks_cached=sum(pool.cached_blocks for pool in pools),
            **asdict(self._totals),
        )

    def take_events(self) -> list[KvEvent]:
        """Return the cache events since the last call (none unless ``record_events``)."""
        return self.kv.take_events()

    def schedule(self, inbox: Sequence[InboxEvent], now_s: float) -> StepPlan:
        """Plan one step.

        Args:
            inbox: events since the last call, in order.
            now_s: monotonic seconds.

        Returns:
            The plan; without rows if there is nothing to compute.

        Mutates: requests, blocks, slots: progress is counted as if the plan had run.
        Requires: fewer than ``steps_in_flight`` plans await `apply`.
        """
        invariant(len(self._flights) < self._config.steps_in_flight, "too many plans await their result")
        self._take_inbox(inbox)
        draft = StepDraft(StepId(self._steps), self._config.max_num_batched_tokens, self._releases)
        for slot in self._releases:
            heapq.heappush(self._free_slots, slot)
        self._releases = []
        self._steps += 1
        prefills = self._plan_decodes(draft)
        self._plan_prefills(draft, prefills)
        if not draft.preempted:
            self._admit(draft, now_s)
        plan = draft.plan()
        tokens = self._config.max_num_batched_tokens - draft.budget_tokens
        self._flights.append(Flight(plan, draft.requests, draft.decoding, tokens, now_s))
        return plan

    def planned_ids(self) -> list[RequestId]:
        """Return who has work in a plan that awaits its result; twice if in two plans."""
        return [
            request.request_id
            for flight in self._flights
            for owners in (flight.decoding, flight.requests)
            for request in owners
        ]

    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> StepNews:
        """Settle a plan with its result.

        Args:
            plan: the oldest one not applied.
            result: the worker's answer, aligned with decodes and rows of the plan.
            now_s: monotonic seconds.

        Returns:
            News about requests. Work for requests that have ended meanwhile is dropped.

        Mutates: requests, blocks, slots, the prefix cache.
        """
        invariant(
            bool(self._flights) and self._flights[0].plan.step == plan.step == result.step,
            f"result {result.step} for plan {plan.step}, which is not the oldest in flight",
        )
        flight = self._flights.popleft()
        wanted = (len(plan.rows), len(plan.decodes))
        given = (len(result.rows), len(result.decode_tokens))
        invariant(given == wanted, f"step {plan.step}: results for {given} rows and decodes in place of {wanted}")
        deltas, self._refusals = self._refusals, []
        request_ids, token_ids = self._apply_decodes(flight, result, deltas)
        self._apply_rows(flight, result, deltas)
        self._totals.step_tokens = flight.tokens
        self._totals.step_s = now_s - flight.started_s
        return StepNews(request_ids, token_ids, deltas)

    def _apply_decodes(
        self, flight: Flight, result: StepResult, deltas: list[RequestDelta]
    ) -> tuple[list[RequestId], list[int]]:
        """Settle the decodes; return the requests that have one new token and no other news, and these tokens.

        The other half of the hot loop, beside `_plan_decodes`. Mutates: as `apply`, and ``deltas``.
        """
        for index, why in result.decode_errors:
            if flight.decoding[index].state is not RequestState.FINISHED:
                deltas.append(self._fail(flight.decoding[index], why))
        request_ids: list[RequestId] = []
        token_ids: list[int] = []
        others = len(deltas)
        lost, finished, advance = flight.preempted_ids, RequestState.FINISHED, self.kv.advance
        for request, token in zip(flight.decoding, result.decode_tokens, strict=True):
            if request.state is finished:
                continue
            known_ids = request.token_ids
            if not lost or request.request_id not in lost:
                request.computed_tokens = computed_tokens = request.computed_tokens + 1
                if computed_tokens >= request.kv.advance_at_tokens:
                    advance(request.kv, known_ids, computed_tokens)
            known_ids.append(token)
            if token in request.stop_token_ids or len(known_ids) >= request.limit_tokens or not request.delta_sent:
                deltas.append(token_delta(request, token, self._end_of(request)))
            else:
                request_ids.append(request.request_id)
                token_ids.append(token)
        self._totals.generation_tokens += len(token_ids) + len(deltas) - others
        return request_ids, token_ids

    def _apply_rows(self, flight: Flight, result: StepResult, deltas: list[RequestDelta]) -> None:
        """Settle the rows. Mutates: as `apply`, and ``deltas``."""
        lost, finished = flight.preempted_ids, RequestState.FINISHED
        for request, row, answer in zip(flight.requests, flight.plan.rows, result.rows, strict=True):
            if request.state is finished:
                continue
            if answer.error is not None:
                deltas.append(self._fail(request, answer.error))
                continue
            # A request preempted since then owns no KV any more; its sample is as good as ever.
            if not lost or request.request_id not in lost:
                request.computed_tokens = computed_tokens = row.start + row.tokens
                if computed_tokens >= request.kv.advance_at_tokens:
                    self.kv.advance(request.kv, request.token_ids, computed_tokens)
            if row.sample:
                self._totals.generation_tokens += 1
                deltas.append(self._take_sample(request, row, answer))
            elif answer.prompt_logprobs:
                deltas.append(row_delta(request, row, answer, None))

    def _take_inbox(self, inbox: Sequence[InboxEvent]) -> None:
        for event in inbox:
            if isinstance(event, AddRequest):
                self._add(event.request)
            elif isinstance(event, AbortRequest):
                request = self._requests.get(event.request_id)
                if request is not None:
                    self._finish(request)
            else:
                self.kv.forget_idle()

    def _add(self, source: EngineRequest) -> None:
        try:
            if source.request_id in self._requests:
                raise RequestError(f"request id {source.request_id!r} is in use", param="request_id")
            # Free slots count as room in the queue, so that max_queue 1 does not refuse what could run at once.
            most_requests = self._config.max_queue + self._config.max_num_seqs
            if len(self._requests) >= most_requests:
                raise OverloadedError(
                    f"{len(self._running)} requests run and {len(self._waiting)} wait, which is the limit "
                    f"(--max-num-seqs {self._config.max_num_seqs}, --max-queue {self._config.max_queue}): retry later"
                )
            check_request(
                source,
                layout=self._layout,
                capacity_tokens=self._capacity_tokens,
                max_model_len=self._max_model_len,
                hash_tokens=self.kv.hash_tokens,
            )
        except HeadraceError as error:
            self._refusals.append(refusal_delta(source, error))
            return
        request = Request(
            source,
            order_key=order_key(source, self._config.policy, self._entered),
            limit_tokens=limit_tokens(source, self._max_model_len),
            kv=self.kv.new_sequence(
                extras=extras_of(source),
                hashes=source.block_hashes,
                prompt_tokens=len(source.prompt_token_ids),
                encoder_tokens=source.encoder_tokens,
            ),
        )
        self._entered += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)
        # A resubmitted request may have produced its last token before the core died.
        finish = finish_of(request) if source.produced_token_ids else None
        if finish is not None:
            self._refusals.append(end_delta(request, *finish, error=None))
            self._finish(request)

    def _plan_decodes(self, draft: StepDraft) -> list[Request]:
        """Plan every running request that lacks one token; return those that lack more.

        This is the hot loop: about a microsecond a request, and nothing that grows with the context.
        """
        prefills: list[Request] = []
        decodes, decoding, running = draft.decodes, draft.decoding, RequestState.RUNNING
        for request in list(self._running.values()):
            known_tokens, start = request.known_tokens, request.planned_tokens
            if known_tokens - start != 1:
                prefills.append(request)
                continue
            # At its limit, it only waits for the result of its last sample. A victim of this step is not running.
            if known_tokens >= request.limit_tokens or request.state is not running:
                continue
            if known_tokens > request.kv.covered_tokens and not self._grow(request, known_tokens, draft):
                continue
            if not request.plain:
                self._add_row(request, 1, draft)
                continue
            if known_tokens >= request.kv.save_at_tokens:
                draft.saves += self.kv.plan_saves(request.kv, known_tokens)
            decodes.append(request.slot)  # type: ignore[arg-type]
            decoding.append(request)
            draft.budget_tokens -= 1
            request.planned_tokens = known_tokens
            request.known_tokens = known_tokens + 1
        return prefills

    def _plan_prefills(self, draft: StepDraft, prefills: Sequence[Request]) -> None:
        for request in prefills:
            tokens = self._chunk(request.known_tokens - request.planned_tokens, draft)
            # The state: an earlier request of this step may have taken this one's blocks.
            if not tokens or request.state is not RequestState.RUNNING:
                continue
            start = request.planned_tokens
            tokens = self.kv.next_stop(request.kv, start, start + tokens) - start
            if self._grow(request, start + tokens, draft):
                self._add_row(request, tokens, draft)

    def _add_row(self, request: Request, tokens: int, draft: StepDraft) -> None:
        draft.add_row(request, tokens)
        if request.planned_tokens >= request.kv.save_at_tokens:
            draft.saves += self.kv.plan_saves(request.kv, request.planned_tokens)

    def _chunk(self, todo_tokens: int, draft: StepDraft) -> int:
        most_tokens = self._config.long_prefill_token_threshold or todo_tokens
        return min(todo_tokens, most_tokens, draft.budget_tokens)

    def _grow(self, request: Request, tokens: int, draft: StepDraft) -> bool:
        """Make room for ``tokens`` tokens, preempting the last in order until it fits or the request is the victim."""
        while True:
            blocks = self.kv.grow(request.kv, tokens)
            if blocks is not None:
                if any(blocks):
                    draft.appends.append(BlockAppend(owned_slot(request), blocks))
                return True
            alone = len(self._running) == 1
            invariant(
                not (alone and request.kv.alone),
                f"{request.request_id} was admitted but does not fit into empty memory: {tokens} tokens",
            )
            victim = max(self._running.values(), key=lambda candidate: candidate.order_key)
            self._preempt(victim, draft)
            if alone:
                self.kv.restart_alone(request.kv)
            if victim is request:
                return False

    def _preempt(self, victim: Request, draft: StepDraft) -> None:
        """Take blocks and slot from a running request; it will compute again what the prefix cache has lost by then."""
        draft.remove(victim)
        for save in self.kv.undo_saves(victim.kv, victim.planned_tokens):
            draft.saves.remove(save)
        draft.preempted = True
        for flight in self._flights:
            flight.preempted_ids.add(victim.request_id)
        draft.releases.append(self._stop_running(victim))
        heapq.heappush(self._free_slots, draft.releases[-1])
        victim.move_to(RequestState.PREEMPTED)
        victim.planned_tokens = victim.computed_tokens = 0
        victim.preemptions += 1
        self._totals.preemptions += 1
        self._waiting.push(victim)

    def _stop_running(self, request: Request) -> Slot:
        """Take blocks and slot away; the caller has the slot released in a plan."""
        slot = owned_slot(request)
        self.kv.release(request.kv)
        del self._running[request.request_id]
        request.slot = None
        return slot

    def _admit(self, draft: StepDraft, now_s: float) -> None:
        """Start waiting requests in order until one does not fit."""
        kept_blocks: list[int] | None = None
        while len(self._waiting) and self._free_slots and draft.budget_tokens and not self._runs_alone():
            kept_blocks = kept_blocks or self._promised_blocks()
            request = self._waiting.first()
            if self._is_still_blocked(request, kept_blocks):
                break
            hit = self._hit_of(request)
            demand_blocks = self.kv.demand_blocks(hit, request.known_tokens, request.kv)
            if not self.kv.has_free(demand_blocks, kept_blocks, hit) and not self._running:
                # Nothing will be freed: its own hit is in the way, because it pins memory that other groups need.
                hit = self.kv.no_hit()
                demand_blocks = self.kv.demand_blocks(hit, request.known_tokens, request.kv)
            if not self.kv.has_free(demand_blocks, kept_blocks, hit):
                self._blocked = (request, demand_blocks)
                self.kv.watch(() if request.wants_prompt_logprobs else request.kv.hashes)
                break
            self._blocked = None
            tokens = self._chunk(request.known_tokens - hit.tokens, draft)
            tokens = self.kv.next_stop(request.kv, hit.tokens, hit.tokens + tokens) - hit.tokens
            alone = not self._running
            self._start(request, hit, tokens, draft, now_s)
            promised = self.kv.missing_blocks(request.kv, request.known_tokens)
            before = self._watermark_blocks if alone else kept_blocks
            kept_blocks = [kept + more for kept, more in zip(before, promised, strict=True)]

    def _runs_alone(self) -> bool:
        """Return whether the one running request fits only as long as nobody else has blocks."""
        return len(self._running) == 1 and next(iter(self._running.values())).kv.alone

    def _hit_of(self, request: Request) -> Hit:
        return self.kv.no_hit() if request.wants_prompt_logprobs else self.kv.find_hit(request.kv, request.token_ids)

    def _is_still_blocked(self, request: Request, kept_blocks: Sequence[int]) -> bool:
        """Return True if the request did not fit at its last look-up and cannot fit now, without looking up again.

        A look-up grows with the prompt, and a full cache keeps the head of the queue waiting for many steps. What it
        asks for cannot shrink as long as none of its blocks is published and nobody else is started.
        """
        if self._blocked is None or self._blocked[0] is not request or self.kv.watched_published:
            return False
        return not self.kv.has_free(self._blocked[1], kept_blocks)

    def _promised_blocks(self) -> list[int]:
        """Return per group the free blocks that a new request must leave: the watermark, and prompts half computed."""
        if not self._running:
            return [0] * len(self._watermark_blocks)
        kept = list(self._watermark_blocks)
        for request in self._running.values():
            if request.known_tokens > request.kv.covered_tokens:
                for index, missing in enumerate(self.kv.missing_blocks(request.kv, request.known_tokens)):
                    kept[index] += missing
        return kept

    def _start(self, request: Request, hit: Hit, tokens: int, draft: StepDraft, now_s: float) -> None:
        self._waiting.remove(request)
        draft.copies += self.kv.start(request.kv, hit, hit.tokens + tokens)
        request.move_to(RequestState.RUNNING)
        invariant(request.known_tokens == len(request.token_ids), f"{request.request_id} resumes with a step in flight")
        request.slot = heapq.heappop(self._free_slots)
        self._running[request.request_id] = request
        request.planned_tokens = request.computed_tokens = hit.tokens
        if request.first_scheduled_s is None:
            # A later start hits what the request itself has computed: that saves nothing it would not have paid for.
            request.cached_tokens = min(hit.tokens, request.prompt_tokens)
            request.first_scheduled_s = now_s
            self._totals.started(request.prompt_tokens, len(request.token_ids), hit.tokens)
        draft.add_start(request)
        self._add_row(request, tokens, draft)

    def _take_sample(self, request: Request, row: PlanRow, answer: RowResult) -> RequestDelta:
        token_ids = answer.token_ids
        if len(token_ids) != 1:
            raise InvariantError(f"{request.request_id}: {len(token_ids)} tokens sampled where one was asked for")
        request.token_ids.append(token_ids[0])
        return row_delta(request, row, answer, self._end_of(request))

    def _end_of(self, request: Request) -> tuple[FinishReason, int | None] | None:
        """Finish a request if its last token ends it; return reason and stop token."""
        known_ids = request.token_ids
        if known_ids[-1] not in request.stop_token_ids and len(known_ids) < request.limit_tokens:
            return None
        finish = finish_of(request)
        if finish is not None:
            self._finish(request)
        return finish

    def _fail(self, request: Request, reason: str) -> RequestDelta:
        """End a request whose row failed. What it has computed may be broken, so nobody may hit it."""
        self.kv.forget(request.kv)
        self._finish(request)
        error = record_of(NumericalError(f"the model's output for this request is not usable: {reason}"))
        return end_delta(request, FinishReason.ERROR, None, error)

    def _finish(self, request: Request) -> None:
        """End a request in any state; rows in flight are dropped when their results come."""
        if request.state is RequestState.RUNNING:
            self._releases.append(self._stop_running(request))
        else:
            self._waiting.remove(request)
            self._blocked = None
        request.move_to(RequestState.FINISHED)
        del self._requests[request.request_id]

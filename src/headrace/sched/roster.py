"""Who is where: all requests of the scheduler, with their slots and blocks, and the moves between them.

Each move keeps queues, slots, blocks, encoder outputs and jobs in step, on every exit path. Must not choose who moves;
the passes do.
"""

from __future__ import annotations

import heapq
from collections import deque

from headrace.base.ids import RequestId, Slot
from headrace.config.engine import SchedulerConfig
from headrace.kv.coordinator import KvCoordinator
from headrace.sched.deadlines import Deadlines
from headrace.sched.draft import Flight, StepDraft, owned_slot
from headrace.sched.encoding import EncoderGate
from headrace.sched.gates import Gates
from headrace.sched.queues import WaitingQueue
from headrace.sched.remote import RemoteGate
from headrace.sched.request import PARKED, REMOTE, Request, RequestState
from headrace.sched.totals import Totals
from headrace.types.outputs import RequestDelta


class Roster:
    """What all parts of the scheduler share.

    Attributes:
        config: limits and policy.
        kv: block tables.
        encoder: outputs of encoders, or None if the model has none.
        remote: loads from an outside store, or None without one.
        requests: all that have not ended.
        running: those with a slot, in the order in which they got it.
        queue: those that may start.
        gates: those that may not yet.
        deadlines: when requests must have ended.
        free_slots: a heap.
        releases: slots to be released in the next plan; free from then on.
        news: ends to be reported with the next result.
        flights: plans without a result, oldest first.
        totals: counters.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KvCoordinator, encoder: EncoderGate | None, remote: RemoteGate | None
    ) -> None:
        self.config = config
        self.kv = kv
        self.encoder = encoder
        self.remote = remote
        self.requests: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self.queue = WaitingQueue()
        self.gates = Gates(self.queue)
        self.deadlines = Deadlines(self.requests)
        self.free_slots: list[Slot] = [Slot(slot) for slot in range(config.max_num_seqs)]
        self.releases: list[Slot] = []
        self.news: list[RequestDelta] = []
        self.flights: deque[Flight] = deque()
        self.totals = Totals()

    @property
    def open_jobs(self) -> int:
        """Jobs that have not reported; they may hold blocks of nobody."""
        return len(self.remote.ledger) if self.remote else 0

    @property
    def arrived(self) -> list[Request]:
        """Requests that hold loaded blocks and wait for a slot."""
        return self.remote.arrived if self.remote else []

    def holders(self) -> list[Request]:
        """Return all requests that hold blocks, with a slot or without."""
        without = [*self.remote.loading, *self.remote.arrived] if self.remote else []
        return [*self.running.values(), *without]

    def waiting(self) -> list[Request]:
        """Return all requests without a slot, in order."""
        without = [*self.remote.loading, *self.remote.arrived] if self.remote else []
        others = [*self.gates.parked, *without]
        if not others:
            return self.queue.requests()
        return sorted([*self.queue.requests(), *others], key=lambda request: request.order_key)

    def take_slot(self, request: Request, computed_tokens: int, now_s: float) -> None:
        """Let a request run.

        Args:
            request: holds blocks, its state is RUNNING.
            computed_tokens: tokens whose KV is in them.
            now_s: monotonic seconds.

        Mutates: ``request``, slots, totals.
        Requires: a slot is free.
        """
        request.slot = heapq.heappop(self.free_slots)
        self.running[request.request_id] = request
        request.planned_tokens = request.computed_tokens = computed_tokens
        if request.first_scheduled_s is None:
            # A later start hits what the request itself has computed: that saves nothing it would not have paid for.
            request.cached_tokens = min(computed_tokens, request.prompt_tokens)
            request.first_scheduled_s = now_s
            self.totals.started(request.prompt_tokens, len(request.token_ids), computed_tokens)

    def preempt(self, victim: Request, draft: StepDraft, *, alone: bool = False) -> None:
        """Take the blocks of a request; it will compute again what the prefix cache has lost by then.

        Args:
            victim: runs, or has arrived.
            draft: the step being planned.
            alone: nobody else holds a block, and still it could not grow: it starts anew in empty memory.

        Mutates: ``victim``, blocks, slots, the queue, ``draft``.
        """
        draft.preempted = True
        self.totals.preemptions += 1
        victim.preemptions += 1
        if victim.state is RequestState.RUNNING:
            in_worker = not draft.remove(victim)
            for flight in self.flights:
                flight.preempted_ids.add(victim.request_id)
            slot = owned_slot(victim)
            if in_worker:
                draft.releases.append(slot)
            heapq.heappush(self.free_slots, slot)
        self._let_go(victim)
        if alone:
            self.kv.restart_alone(victim.kv)
        victim.move_to(RequestState.PREEMPTED)
        victim.restart()
        self.queue.push(victim)

    def finish(self, request: Request) -> None:
        """End a request in any state; rows in flight are dropped when their results come.

        Mutates: ``request``, blocks, slots, queues.
        """
        if request.state in PARKED:
            self.gates.drop(request)
        elif request.state is RequestState.RUNNING:
            self.releases.append(owned_slot(request))
            self._let_go(request)
        elif request.state not in REMOTE:
            self.queue.remove(request)
        was_remote = request.state in REMOTE
        if self.remote is not None:
            # Blocks of a load stay with its job until that has reported.
            self.remote.finished(request)
        request.move_to(RequestState.FINISHED)
        del self.requests[request.request_id]
        self.gates.leader_ended(request.request_id)
        if was_remote:
            self.gates.tenant_released(request.source.tenant)
            self.gates.load_ended()

    def _let_go(self, request: Request) -> None:
        """Take blocks, encoder outputs and slot away; the caller has the slot released in a plan."""
        self.kv.release(request.kv)
        if self.encoder is not None and request.source.media:
            self.encoder.release(request.request_id)
        if request.slot is None:
            if self.remote is not None:
                self.remote.resumed(request)
        else:
            del self.running[request.request_id]
            request.slot = None
        self.gates.tenant_released(request.source.tenant)

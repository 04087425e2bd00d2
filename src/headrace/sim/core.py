"""One life of an engine core: a scheduler and its device, the plans between them, and what must hold at all times.

Must not know actions or the front end's side of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from headrace.base.ids import BlockId, RequestId
from headrace.kv.events import KvEvent
from headrace.sched.request import QUEUED, REMOTE, Request, RequestState
from headrace.sched.scheduler import Scheduler
from headrace.sim.cells import demand
from headrace.sim.checks import check_encoder, check_idle, check_owners, check_pools, check_requests
from headrace.sim.device import Facts, FakeDevice
from headrace.sim.faults import Faults
from headrace.sim.figures import Figures
from headrace.sim.mirror import CacheMirror
from headrace.sim.observer import Observer
from headrace.sim.probe import HitProbe
from headrace.sim.setup import SimSetup
from headrace.sim.store import FakeStore
from headrace.tiers.ledger import OpenJob
from headrace.types.events import InboxEvent, JobDone
from headrace.types.outputs import StepNews
from headrace.types.plans import PlanRow, StepPlan
from headrace.types.requests import EngineRequest
from headrace.types.results import StepResult

_OWNER_CHECK_CALLS, _FULL_CHECK_CALLS = 3, 19
"""Dearer checks run after so many calls of the scheduler: what they look for does not go away by itself."""

_PROBED_REQUESTS = 12
"""So many of the last requests are looked up in turn."""

LOOKUP_TIMEOUT_S, LOAD_TIMEOUT_S = 0.05, 0.2
"""In steps of a millisecond: short enough to pass in a run."""


def make_scheduler(setup: SimSetup, store: FakeStore | None, life: int) -> Scheduler:
    """Return a new scheduler with all that a run has switched on."""
    return Scheduler(
        setup.scheduler,
        layout=setup.layout,
        max_model_len=setup.max_model_len,
        enable_prefix_caching=setup.prefix_caching,
        hash_seed=setup.hash_seed if life == 1 or setup.keeps_hash_seed else f"{setup.hash_seed} {life}",
        hash_tokens=setup.hash_tokens,
        checkpoint_tokens=setup.checkpoint_tokens,
        eviction=setup.eviction,
        encoder_cache_rows=setup.encoder_rows,
        encoder_budget_rows=setup.encoder_budget_rows,
        connector=store,
        lookup_timeout_s=LOOKUP_TIMEOUT_S,
        load_timeout_s=LOAD_TIMEOUT_S,
        first_job_id=life * 1_000_000,
        record_events=True,
    )


_READY = QUEUED | {RequestState.ARRIVED}


class SimCore:
    """Scheduler and device of one life.

    Attributes:
        scheduler: the real one.
        device: the fake one.
        running: requests with a slot, after the last call of the scheduler.
        waiting: the others.
        requests: all of them.
        planned: plans that the device has not run.
        executed: plans with results that were not applied.
        next_step: number of the next plan.
        stalled_plans: so many in a row computed nothing, although somebody waited for nothing but room.
        held_before: who held blocks before the last plan, where there are quotas.
        figures: what the scheduler's running totals must be.
        extents_lent_on: extents that went from one group to another.
    """

    def __init__(
        self, setup: SimSetup, observer: Observer, faults: Faults, store: FakeStore | None, *, life: int
    ) -> None:
        """Begin a life.

        Args:
            setup: sizes and options.
            observer: knows the requests.
            faults: decides about drafts.
            store: outside store, or None.
            life: number of the life, from 1.
        """
        self._setup = setup
        self._observer = observer
        self._faults = faults
        self.scheduler = make_scheduler(setup, store, life)
        config = setup.scheduler
        facts = Facts(
            source_of=self._source_of,
            fails_at=lambda request_id: observer.records[request_id].fails_at,
            published_cells=self._published_cells,
            guess=self._guess,
            contents_of=lambda request_id, tokens: observer.records[request_id].contents(tokens),
            settled_tokens=lambda request_id: len(observer.records[request_id].output_ids),
        )
        self.device = FakeDevice(
            setup.layout,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            setup.vocab_tokens,
            facts,
            setup.encoder_rows,
            setup.encoder_budget_rows,
            drafts=config.speculative_tokens > 0,
        )
        self.mirror = CacheMirror(len(setup.layout.groups), self._content_at)
        self.planned: deque[StepPlan] = deque()
        self.executed: deque[tuple[StepPlan, StepResult]] = deque()
        self.next_step = 0
        self.stalled_plans = 0
        self.figures = Figures(has_store=store is not None)
        self.probe = HitProbe(self.scheduler.kv, self.device.cells, self.mirror.hashes)
        self.extents_lent_on = 0
        self.held_before: set[RequestId] = set()
        self._extents = [-1] * setup.layout.num_extents
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.requests: list[Request] = []
        self._seen: list[Request] = []
        self._calls = 0

    def schedule(self, inbox: Sequence[InboxEvent], now_s: float) -> StepPlan:
        """Plan a step."""
        self._seen = self.requests
        if self._setup.scheduler.tenant_quota < 1.0:
            self.held_before = {request.request_id for request in self.holders()}
        loading = {request.request_id for request in self.waiting if request.state in REMOTE}
        plan = self.scheduler.schedule(inbox, now_s)
        self._look()
        demand(plan.step == self.next_step, f"plan {plan.step} in place of {self.next_step}")
        self.next_step += 1
        self.planned.append(plan)
        self.figures.planned(plan, loading)
        stalled = not plan.total_tokens and bool(self.running or self.ready())
        self.stalled_plans = self.stalled_plans + 1 if stalled else 0
        return plan

    def execute(self) -> None:
        """Let the device run the oldest plan."""
        plan = self.planned.popleft()
        self.executed.append((plan, self.device.execute(plan)))

    def apply(self, now_s: float) -> StepNews:
        """Settle the oldest plan."""
        self._seen = self.requests
        plan, result = self.executed.popleft()
        news = self.scheduler.apply(plan, result, now_s)
        self._look()
        self.figures.told(news)
        return news

    def _look(self) -> None:
        """Note who is there: the scheduler makes new lists at each question."""
        scheduler = self.scheduler
        self.running = scheduler.running
        self.waiting = scheduler.waiting
        self.requests = [*self.running, *self.waiting]

    def land(self, event: JobDone) -> None:
        """Let a load of this life write its blocks; a report of an earlier one, or a second one, writes nothing."""
        entry = self.device.loads.open_jobs.get(event.job_id)
        if entry is not None:
            self.device.loads.land(event.job_id, event.valid_tokens)
            if event.valid_tokens >= entry.job.end_tokens:
                self.figures.loaded(entry.job)

    def check(self) -> list[KvEvent]:
        """Check every invariant that holds between two calls; return the cache events since the last check."""
        scheduler = self.scheduler
        kv = scheduler.kv
        self._calls += 1
        if self._calls % _OWNER_CHECK_CALLS == 0:
            check_owners(kv, self.holders(), self.open_jobs())
            check_requests(self.running, self.waiting, self._setup.scheduler)
        events = scheduler.take_events()
        if events:
            stored = self.mirror.take(events)
            # What is published was applied, so the device has run it.
            self.mirror.check_contents(kv, self.device.cells, stored)
        if scheduler.encoder is not None:
            check_encoder(scheduler.encoder.cache, self.running)
        if self._calls % _FULL_CHECK_CALLS == 0:
            extents = check_pools(kv)
            self.extents_lent_on += sum(
                -1 not in (old, new) and old != new for old, new in zip(self._extents, extents, strict=True)
            )
            self._extents = extents
            self.mirror.check_all(kv, self.device.cells)
            self.figures.check(scheduler)
            self._probe()
        return events

    def _probe(self) -> None:
        """Look up what one of the last requests would find now."""
        observer = self._observer
        if not self._setup.prefix_caching or not observer.records:
            return
        if not observer.counts["error non_finite_logits"]:  # broken content is forgotten wherever it lies
            self.probe.check_published(self.running, self.figures.began)
        if len(self.running) > 1:
            self.probe.check_common(self.running)
        names = list(islice(reversed(observer.records), _PROBED_REQUESTS))
        record = observer.records[names[self._calls // _FULL_CHECK_CALLS % len(names)]]
        if record.source.prompt_token_ids:
            self.probe.look_up(record)

    def check_end(self) -> None:
        """Nothing is left."""
        scheduler = self.scheduler
        demand(not self.device.slots, f"slots {list(self.device.slots)} were never released")
        demand(not self.device.loads.open_jobs, f"jobs {list(self.device.loads.open_jobs)} never ended")
        check_pools(scheduler.kv)
        self.mirror.check_all(scheduler.kv, self.device.cells)
        check_idle(scheduler.kv)
        if scheduler.encoder is not None:
            demand(scheduler.encoder.cache.used_rows == 0, "encoder outputs are held by nobody")
            kept = set(scheduler.encoder.cache.identifiers)
            demand(kept == set(self.device.encoders.rows), "the worker keeps other encoder outputs than the scheduler")
        self.figures.check(scheduler)
        demand(not self.requests, f"requests {list(self.at_work_ids())} never ended")

    def holders(self) -> list[Request]:
        """Requests that may hold blocks."""
        remote = self.scheduler.remote
        return self.running if remote is None else [*self.running, *remote.loading, *remote.arrived]

    def ready(self) -> list[Request]:
        """Requests without a slot that wait for nothing but room, in order."""
        return [request for request in self.waiting if request.state in _READY]

    def open_jobs(self) -> list[OpenJob]:
        """Loads that have not reported."""
        remote = self.scheduler.remote
        return [] if remote is None else remote.ledger.jobs

    @property
    def computes(self) -> bool:
        """Whether a plan in flight computes something."""
        return any(plan.total_tokens for plan in self.planned) or any(plan.total_tokens for plan, _ in self.executed)

    @property
    def can_move(self) -> bool:
        """Whether the scheduler could do something without help from outside."""
        scheduler = self.scheduler
        if self.open_jobs() and self.stalled_plans > self._setup.scheduler.steps_in_flight:
            # What is free is not enough, and the rest may be held by loads that nobody waits for any more.
            return False
        if self.running or self.ready():
            return True
        # Something to report or to release.
        return scheduler.has_work and not self.waiting and not self.open_jobs()

    def at_work_ids(self) -> set[RequestId]:
        """Requests that the scheduler has."""
        return {request.request_id for request in self.requests}

    def decode_rows(self, plan: StepPlan) -> list[PlanRow]:
        """Return the decodes of a plan as rows, for people."""
        owners = {request.slot: request for request in self.running}
        return [
            PlanRow(slot, owners[slot].request_id, owners[slot].planned_tokens - 1, 1, True) for slot in plan.decodes
        ]

    def _source_of(self, request_id: RequestId) -> EngineRequest:
        return self._observer.records[request_id].source

    def _published_cells(self, group: int, block: BlockId) -> int:
        pool = self.scheduler.kv.memory.pools[group]
        return self.mirror.published_cells(pool, self.device.cells.shapes[group], block)

    def _guess(self, request_id: RequestId, position: int, right: int) -> int:
        roll = self._faults.roll("draft", request_id, position)
        return right if roll % 8 < self._setup.right_drafts else (right + 1) % self._setup.vocab_tokens

    def _content_at(self, block_hash: bytes) -> tuple[int, int] | None:
        unit = self.scheduler.kv.hash_tokens
        # Those of before the call: who publishes may have ended in it.
        for request in [*self.requests, *self._seen]:
            # An encoder input without a name is in no hash, so such a sequence bears the hashes of others.
            source = request.source
            nameless = source.encoder_tokens and all(span.tokens for span in source.media)
            if not nameless and block_hash in request.kv.hashes:
                tokens = (request.kv.hashes.index(block_hash) + 1) * unit
                return tokens, self._observer.records[request.request_id].contents(tokens)[-1]
        return None

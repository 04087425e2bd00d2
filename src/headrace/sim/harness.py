"""Drives the real scheduler against the fake device and the faulty world, and compares all that comes out.

The driver decides when to post, plan, execute and apply; this class makes sure that each of these is legal for an
engine and that nothing impossible comes back. Must not choose anything at random.
"""

from __future__ import annotations

from collections import Counter

from headrace.base.errors import RequestError
from headrace.base.ids import RequestId
from headrace.sim.actions import Action, ActionKind
from headrace.sim.cells import demand
from headrace.sim.core import SimCore
from headrace.sim.coverage import StateWatch, count_layout
from headrace.sim.faults import Faults
from headrace.sim.liveness import Liveness
from headrace.sim.observer import Observer, Record
from headrace.sim.oracle import expected_output
from headrace.sim.rights import check_followers, check_quotas
from headrace.sim.setup import SimSetup
from headrace.sim.store import FakeStore, Timetable
from headrace.sim.story import Story
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
from headrace.types.outputs import StepNews
from headrace.types.plans import StepPlan
from headrace.types.requests import EngineRequest

STEP_S = 0.001
"""Time that passes with every applied step."""


class Harness:
    """One engine in small: core, device, store, and an observer in place of the front end.

    Attributes:
        setup: sizes and options.
        core: the scheduler of the present life, with its device.
        observer: what the front end knows.
        actions: what was done so far.
        inbox: events that the scheduler has not taken.
        busy_steps: steps that computed something.
        at_step: number of the step that was planned, executed or applied last.
        counts: how often interesting things happened.
        now_s: time.
    """

    def __init__(self, setup: SimSetup, story: Story | None = None, *, faults: Faults | None = None) -> None:
        """Make an idle engine.

        Args:
            setup: sizes and options.
            story: is told all that happens.
            faults: decides what goes wrong, in place of the seed; for scenarios.
        """
        self.setup = setup
        self.story = story
        self.actions: list[Action] = []
        self.at_step = 0
        self.busy_steps = 0
        self.lives = 1
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        self.faults = faults or Faults(setup.seed, setup.sites)
        self.timetable = Timetable()
        self.store: FakeStore | None = None
        if setup.store != "none":
            self.store = FakeStore(self.faults, self.timetable, divergent_hits=setup.store == "divergent")
        self.observer = Observer()
        self.inbox: list[InboxEvent] = []
        self._twice: list[EngineRequest] = []
        self._watch = StateWatch(self.counts)
        self._liveness = Liveness(setup)
        self.core = self._new_core()
        count_layout(self.counts, setup)

    @property
    def in_flight_steps(self) -> int:
        """Plans that were not applied."""
        return len(self.core.planned) + len(self.core.executed)

    @property
    def steps(self) -> int:
        """Steps that devices have run so far, in all lives."""
        return self.counts["steps"] + self.core.device.executed_steps

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do and nothing to come: an engine would sleep."""
        outside = self.inbox or self.timetable.next_s is not None
        return not (self.in_flight_steps or outside or self.core.scheduler.has_work)

    @property
    def records(self) -> dict[RequestId, Record]:
        """What is known of each request."""
        return self.observer.records

    def live_ids(self) -> list[RequestId]:
        """Requests that the front end believes to be unfinished."""
        return list(self.observer.live)

    def do(self, action: Action) -> None:
        """Do one action and remember it; one that an engine could not do now is passed over.

        Raises:
            SimFault: an invariant is broken or an output is wrong.
        """
        self.actions.append(action)
        match action.kind:
            case ActionKind.ADD if action.source is not None:
                self.add(action.source, action.fails_at)
            case ActionKind.ABORT if action.request_id is not None:
                self.abort(action.request_id)
            case ActionKind.RESET:
                self.reset_prefix_cache()
            case ActionKind.CLOCK:
                self.jump(action.seconds)
            case ActionKind.CRASH:
                self.crash()
            case ActionKind.SCHEDULE if self.in_flight_steps < self.setup.scheduler.steps_in_flight:
                self.schedule()
            case ActionKind.EXECUTE:
                self.execute()
            case ActionKind.APPLY if self.in_flight_steps:
                self.apply()

    def add(self, source: EngineRequest, fails_at: int | None = None) -> None:
        """Post a request; ``fails_at`` is the output position at which its logits are not finite.

        One whose id is known is a mistake of the front end: it must be refused without harm to the first.
        """
        known = self.records.get(source.request_id)
        if self.story:
            self.story.posted(source, fails_at)
        if known is not None:
            self._twice.append(source)
            return
        setup = self.setup
        expected = expected_output(source, vocab_tokens=setup.vocab_tokens, max_model_len=setup.max_model_len)
        if fails_at is not None:
            fails_at = max(fails_at, len(source.produced_token_ids))
        record = Record(source, expected, fails_at, output_ids=list(source.produced_token_ids))
        self.observer.add(record)
        self._post(record)
        self.counts["requests"] += 1
        self.counts["prompt logprobs"] += source.sampling.prompt_logprobs is not None
        self.counts["resubmitted"] += bool(source.produced_token_ids)

    def _post(self, record: Record) -> None:
        source = record.source
        self.inbox.append(AddRequest(source))
        if source.grammar is None:
            return
        where = source.request_id
        record.grammar_error = self.faults.fires("grammar fails", where)
        error = record_of(RequestError("the grammar cannot be compiled")) if record.grammar_error else None
        late = self.faults.fires("grammar late", where)
        roll = self.faults.roll("grammar", where)
        delay_s = (0.02, 0.1, 3.0)[roll % 3] if late else (0.0, 0.0, 0.001, 0.004)[roll % 4]
        self.timetable.put(self.now_s + delay_s, GrammarReady(source.request_id, error))
        self.counts["grammars"] += 1

    def abort(self, request_id: RequestId) -> None:
        """Post the abort of a request; nobody may mind one of a request that has ended or never was."""
        if request_id in self.observer.live:
            self.observer.abort(request_id)
        else:
            self.counts["aborts of nobody"] += 1
        self.inbox.append(AbortRequest(request_id))
        if self.story:
            self.story.line(f"post abort of {request_id}")

    def reset_prefix_cache(self) -> None:
        """Post that all idle cached blocks be forgotten."""
        self.inbox.append(ResetPrefixCache())
        self.counts["cache resets"] += 1
        if self.story:
            self.story.line("post reset of the prefix cache")

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.counts["clock jumps"] += 1
        if self.story:
            self.story.line(f"the clock jumps by {seconds:g} s to {self.now_s:.3f}")

    def crash(self) -> None:
        """End the core; a new one gets what is unfinished, in the order of arrival."""
        if self.story:
            self.story.line("the core crashes; a new one gets the unfinished requests")
        self.counts["crashes"] += 1
        self.counts["crashes with work in flight"] += self.in_flight_steps > 0
        self.core.figures.check(self.core.scheduler)
        self._harvest()
        jobs = self.timetable.drop(JobDone)
        self.timetable.drop(LookupDone)
        self.timetable.drop(GrammarReady)
        if self.faults.fires("report of a former life", self.lives):
            for number, event in enumerate(jobs):
                delay_s = (0.002, 0.005, 0.01, 0.05)[self.faults.roll("former", self.lives, number) % 4]
                self.timetable.put(self.now_s + delay_s, event)
        self.lives += 1
        if self.store is not None:
            self.store.crashed()
        self.inbox = []
        self._twice = []
        self._liveness.crashed()
        self._watch.crashed()
        self.core = self._new_core()
        for record in self.observer.resubmit():
            self._post(record)

    def schedule(self) -> StepPlan:
        """Plan a step and check the world."""
        demand(self.in_flight_steps < self.setup.scheduler.steps_in_flight, "the simulation plans too far ahead")
        core = self.core
        self._rest()
        self._send_twice()
        self._deliver()
        self.counts["steps planned ahead"] += self.in_flight_steps > 0
        self._watch.before_schedule(self.inbox)
        running = {request.request_id for request in core.running} if self.story else set()
        self.at_step = core.next_step
        plan = core.schedule(self.inbox, self.now_s)
        self.observer.taken(self.inbox)
        self.inbox = []
        self.busy_steps += bool(plan.total_tokens)
        self._watch.plan(plan, self.setup, ahead=self.in_flight_steps > 1)
        if self.story:
            waiting = [request.request_id for request in core.waiting]
            self.story.planned(plan, core.decode_rows(plan), [n for n in waiting if n in running], waiting)
        preempted = self._watch.after_schedule(core.requests, ahead=self.in_flight_steps > 1)
        core.figures.preempted(preempted)
        self.check()
        self.observer.check_deadlines(core.requests, self.now_s)
        check_followers(core, plan)
        check_quotas(self.setup, core, plan)
        self._liveness.after_schedule(core, plan, preempted=preempted > 0)
        return plan

    def execute(self) -> None:
        """Let the device do the oldest planned step, if there is one that need not wait for a mask."""
        core = self.core
        if not core.planned:
            return
        plan = core.planned[0]
        if core.executed and any(row.gated for row in plan.rows):
            return
        self.at_step = plan.step
        if self.story:
            self.story.line("device runs it", plan.step)
        core.execute()
        for job in plan.loads:
            if self.store is not None:
                self.store.now_s = self.now_s
                self.store.begin(job, self.records[job.request_id].contents(job.end_tokens))

    def apply(self) -> StepNews:
        """Settle the oldest step in flight and check the world."""
        core = self.core
        if not core.executed:
            self.execute()
        plan = core.executed[0][0]
        self.at_step = plan.step
        self.now_s += STEP_S
        before = core.at_work_ids() if plan.rows else set()
        news = core.apply(self.now_s)
        dropped = [row.request_id for row in plan.rows if row.request_id not in before]
        self.counts["rows dropped"] += len(dropped)
        if self.story:
            self.story.applied(plan.step, news, dropped)
        self.observer.take(news, now_s=self.now_s)
        self.check()
        self._watch.after_apply(core.requests)
        return news

    def check(self) -> None:
        """Check every invariant that holds between two calls."""
        events = self.core.check()
        if self.story:
            self.story.cache_events(events)

    def drain(self, limit_steps: int = 3000) -> None:
        """Run until nothing is left to do; time jumps to the next event when nobody can do anything before.

        Raises:
            SimFault: some request does not end.
        """
        for _ in range(limit_steps):
            if self.is_idle:
                break
            wanted = self.core.scheduler.has_work or bool(self.inbox) or self.timetable.next_s is not None
            if wanted and self.in_flight_steps < self.setup.scheduler.steps_in_flight:
                self.schedule()
            self.apply()
        demand(not self.core.scheduler.has_work, f"work is left after {limit_steps} steps")
        self._check_end()

    def _rest(self) -> None:
        """Jump to the next thing that happens by itself, if nothing else can happen before."""
        if self.inbox or self.core.computes or self.core.can_move:
            return
        moments = [self.timetable.next_s, self.core.scheduler.next_event_s]
        self.now_s = max(self.now_s, min((moment for moment in moments if moment is not None), default=self.now_s))

    def _deliver(self) -> None:
        for event in self.timetable.take(self.now_s):
            if isinstance(event, JobDone):
                self.core.land(event)
            elif isinstance(event, LookupDone) and self.store is not None:
                self.store.answered(event.request_id)
            if self.story:
                self.story.arrived(event)
            self.inbox.append(event)
        if self.store is not None:
            self.store.now_s = self.now_s

    def _send_twice(self) -> None:
        """Post the requests that are sent again by mistake, as far as the first ones are at work now."""
        at_work = self.core.at_work_ids()
        for source in self._twice:
            record = self.records[source.request_id]
            timed = source.deadline_s is not None
            if source.request_id in at_work and not record.aborted and not timed:
                self.inbox.append(AddRequest(source))
                self.observer.expect_refusal(source.request_id)
                self.counts["ids used twice"] += 1
        self._twice = []

    def _new_core(self) -> SimCore:
        core = SimCore(self.setup, self.observer, self.faults, self.store, life=self.lives)
        if self.store is not None:
            self.store.unit_tokens = core.scheduler.kv.hash_tokens
        return core

    def _harvest(self) -> None:
        """Add what the device and the pools of this life have counted."""
        core = self.core
        self.counts += core.device.counts
        self.counts["steps"] += core.device.executed_steps
        self.counts["extents lent on"] += core.extents_lent_on
        self.counts["encoder runs"] += core.device.encoders.encoded
        self.counts["encoder outputs dropped"] += core.device.encoders.freed
        for kind, pool in zip(self.setup.kinds, core.scheduler.kv.memory.pools, strict=True):
            self.counts["evictions"] += pool.evicted_blocks
            self.counts[f"evicted {kind}"] += pool.evicted_blocks

    def _check_end(self) -> None:
        self.observer.check_end()
        self.core.check_end()
        if self.store is not None:
            self.store.check_end()
        self._harvest()
        self.counts += self.observer.counts
        if self.store is not None:
            self.counts += self.store.counts
        for site, times in self.faults.fired.items():
            self.counts[f"fault {site}"] += times

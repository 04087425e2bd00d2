"""Drives the real scheduler against the fake device, and compares all that comes out with the oracle.

The driver decides when to post, plan, execute and apply; this class makes sure that each of these is legal for an
engine and that nothing impossible comes back. Must not choose anything at random.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import fixed_layout
from headrace.sched.scheduler import Scheduler
from headrace.sim.actions import Action, ActionKind
from headrace.sim.checks import EventReplay, check_blocks, check_no_starvation, check_requests
from headrace.sim.device import Facts, FakeDevice, SimFault, demand
from headrace.sim.oracle import Expected, expected_output
from headrace.sim.story import Story
from headrace.types.cache_specs import FullAttentionSpec, KvLayout, LayerCache
from headrace.types.events import AbortRequest, AddRequest, InboxEvent, ResetPrefixCache
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.plans import StepPlan
from headrace.types.requests import EngineRequest
from headrace.types.results import StepResult


@dataclass(frozen=True)
class SimSetup:
    """Everything that is fixed for one run."""

    scheduler: SchedulerConfig
    layout: KvLayout
    max_model_len: int
    vocab_tokens: int
    enable_prefix_caching: bool = True


def sim_layout(blocks: Sequence[tuple[int, int]]) -> KvLayout:
    """Return a layout from (tokens in a block, usable blocks) of each group."""
    return fixed_layout(
        [LayerCache(group, FullAttentionSpec(group + 1, 4, 4, 4)) for group in range(len(blocks))],
        block_tokens=[block_tokens for block_tokens, _ in blocks],
        usable_blocks=[usable for _, usable in blocks],
    )


@dataclass
class Record:
    """What is known of one request from outside."""

    source: EngineRequest
    expected: Expected
    fails_at: int | None = None
    output_ids: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    finish: RequestDelta | None = None
    aborted: bool = False


class Harness:
    """One engine core in small: scheduler, device, and an observer in place of the front end."""

    def __init__(self, setup: SimSetup, story: Story | None = None) -> None:
        """Make an idle engine.

        Args:
            setup: sizes and options.
            story: is told all that happens.
        """
        self.setup = setup
        self.story = story
        self.actions: list[Action] = []
        self.at_step = 0
        self.busy_steps = 0
        self.scheduler = Scheduler(
            setup.scheduler,
            layout=setup.layout,
            max_model_len=setup.max_model_len,
            enable_prefix_caching=setup.enable_prefix_caching,
            record_events=True,
        )
        self._stats = self.scheduler.stats()
        self.records: dict[RequestId, Record] = {}
        facts = Facts(
            salt_of=lambda request_id: self.records[request_id].source.cache_salt,
            fails_at=lambda request_id: self.records[request_id].fails_at,
            is_published=lambda group, block: self.scheduler.kv.groups[group].pool.hashes_of(block) != (),
        )
        config = setup.scheduler
        self.device = FakeDevice(
            setup.layout, config.max_num_seqs, config.max_num_batched_tokens, setup.vocab_tokens, facts
        )
        self.replay = EventReplay(len(setup.layout.groups))
        self.inbox: list[InboxEvent] = []
        self.planned: deque[StepPlan] = deque()
        self.executed: deque[tuple[StepPlan, StepResult]] = deque()
        self._planned_ids: dict[int, list[RequestId]] = {}
        self._live: dict[RequestId, None] = {}
        self.started_ids: set[RequestId] = set()
        self.counts: Counter[str] = Counter()
        self.now_s = 0.0

    @property
    def in_flight_steps(self) -> int:
        """Plans that were not applied."""
        return len(self.planned) + len(self.executed)

    def do(self, action: Action) -> None:
        """Do one action and remember it; one that an engine could not do now is passed over.

        Raises:
            SimFault: an invariant is broken or an output is wrong.
        """
        self.actions.append(action)
        kind = action.kind
        if kind is ActionKind.ADD and action.source is not None:
            self.add(action.source, action.fails_at)
        elif kind is ActionKind.ABORT and action.request_id in self.live_ids():
            self.abort(action.request_id)
        elif kind is ActionKind.RESET:
            self.reset_prefix_cache()
        elif kind is ActionKind.SCHEDULE and self.in_flight_steps < self.setup.scheduler.steps_in_flight:
            self.schedule()
        elif kind is ActionKind.EXECUTE:
            self.execute()
        elif kind is ActionKind.APPLY and self.in_flight_steps:
            self.apply()

    def add(self, source: EngineRequest, fails_at: int | None = None) -> None:
        """Post a request; ``fails_at`` is the output position at which its logits are not finite."""
        demand(source.request_id not in self.records, "the simulation used an id twice")
        expected = expected_output(source, vocab_tokens=self.setup.vocab_tokens, max_model_len=self.setup.max_model_len)
        if fails_at is not None:
            fails_at = max(fails_at, len(source.produced_token_ids))
        record = Record(source, expected, fails_at, output_ids=list(source.produced_token_ids))
        self.records[source.request_id] = record
        self.inbox.append(AddRequest(source))
        self._live[source.request_id] = None
        self.counts["requests"] += 1
        self.counts["prompt logprobs"] += source.sampling.prompt_logprobs is not None
        self.counts["resubmitted"] += bool(source.produced_token_ids)
        if self.story:
            self.story.posted(source, fails_at)

    def abort(self, request_id: RequestId) -> None:
        """Post the abort of a request."""
        self.records[request_id].aborted = True
        self._live.pop(request_id, None)
        self.inbox.append(AbortRequest(request_id))
        if self.story:
            self.story.line(f"post abort of {request_id}")

    def reset_prefix_cache(self) -> None:
        """Post that all idle cached blocks be forgotten."""
        self.inbox.append(ResetPrefixCache())
        self.counts["cache resets"] += 1
        if self.story:
            self.story.line("post reset of the prefix cache")

    def live_ids(self) -> list[RequestId]:
        """Requests that the front end believes to be unfinished."""
        return list(self._live)

    def schedule(self) -> StepPlan:
        """Plan a step and check the world."""
        demand(self.in_flight_steps < self.setup.scheduler.steps_in_flight, "the simulation plans too far ahead")
        preemptions, self.at_step = self._stats.preemptions, self._stats.step
        running = {request.request_id for request in self.scheduler.running}
        self.counts["steps planned ahead"] += self.in_flight_steps > 0
        self._count_aborts()
        plan = self.scheduler.schedule(self.inbox, self.now_s)
        self.inbox = []
        self.planned.append(plan)
        self.started_ids |= {start.request_id for start in plan.starts}
        self.counts["hits"] += sum(start.computed_tokens > 0 for start in plan.starts)
        self.counts["hit tokens"] += sum(start.computed_tokens for start in plan.starts)
        self.busy_steps += bool(plan.decodes or plan.rows)
        owners = {request.slot: request.request_id for request in self.scheduler.running}
        self._planned_ids[plan.step] = [*(owners[slot] for slot in plan.decodes), *(r.request_id for r in plan.rows)]
        if self.story:
            waiting = [request.request_id for request in self.scheduler.waiting]
            self.story.planned(plan, preempted=[name for name in waiting if name in running], waiting=waiting)
        self.check()
        preempted = self._stats.preemptions - preemptions
        self.counts["preemptions"] += preempted
        self.counts["preempted in flight"] += preempted if self.in_flight_steps > 1 else 0
        idle_tokens = self.setup.scheduler.max_num_batched_tokens - plan.total_tokens
        check_no_starvation(
            self.scheduler,
            budget_left_tokens=idle_tokens,
            max_num_seqs=self.setup.scheduler.max_num_seqs,
            preempted=preempted > 0,
            watermark=self.setup.scheduler.watermark,
        )
        stuck = self.in_flight_steps == 1 and not plan.total_tokens and bool(self.scheduler.running)
        demand(not stuck, "requests run, nothing is in flight, and nothing is planned")
        return plan

    def execute(self) -> None:
        """Let the device do the oldest planned step, if there is one."""
        if self.planned:
            plan = self.planned.popleft()
            self.at_step = plan.step
            if self.story:
                self.story.line("device runs it", plan.step)
            self.executed.append((plan, self.device.execute(plan)))

    def apply(self) -> list[RequestDelta]:
        """Settle the oldest step in flight and check the world."""
        if not self.executed:
            self.execute()
        plan, result = self.executed.popleft()
        self.at_step = plan.step
        self.now_s += 0.001
        before = {request.request_id for request in [*self.scheduler.running, *self.scheduler.waiting]}
        deltas = list(self.scheduler.apply(plan, result, self.now_s).each())
        dropped = [name for name in self._planned_ids.pop(plan.step) if name not in before]
        self.counts["rows dropped"] += len(dropped)
        if self.story:
            self.story.applied(plan.step, deltas, dropped)
        for delta in deltas:
            self._observe(delta)
        self.check()
        return deltas

    def check(self) -> None:
        """Check every invariant that holds between two calls."""
        check_blocks(self.scheduler)
        self._stats = check_requests(self.scheduler, self.setup.scheduler.max_num_seqs)
        events = self.scheduler.take_events()
        if self.story:
            self.story.cache_events(events)
        self.replay.take(events)
        if not self.planned:
            self.replay.check(self.scheduler, self.device)

    def drain(self, limit_steps: int = 3000) -> None:
        """Run until nothing is left to do.

        Raises:
            SimFault: some request does not end.
        """
        for _ in range(limit_steps):
            wanted = self.scheduler.has_work or bool(self.inbox)
            if not wanted and not self.in_flight_steps:
                break
            if wanted and self.in_flight_steps < self.setup.scheduler.steps_in_flight:
                self.schedule()
            self.apply()
        demand(not self.scheduler.has_work, f"work is left after {limit_steps} steps")
        self._check_end()

    def _count_aborts(self) -> None:
        places = {request.request_id: "running" for request in self.scheduler.running}
        places |= {request.request_id: "waiting" for request in self.scheduler.waiting}
        for event in self.inbox:
            if isinstance(event, AbortRequest) and event.request_id in places:
                self.counts[f"aborts {places[event.request_id]}"] += 1

    def _observe(self, delta: RequestDelta) -> None:
        record = self.records[delta.request_id]
        demand(record.finish is None, f"{delta.request_id}: news after the end")
        # An abort that is still in the inbox may be overtaken by news, one that was taken may not.
        pending = any(isinstance(event, AbortRequest) and event.request_id == delta.request_id for event in self.inbox)
        at_the_door = delta.request_id not in self.started_ids
        demand(not record.aborted or pending or at_the_door, f"{delta.request_id}: news after the abort")
        record.output_ids += delta.new_token_ids
        expected = record.expected
        good = record.output_ids == expected.output_ids[: len(record.output_ids)]
        demand(good, f"{delta.request_id}: {record.output_ids} instead of {expected.output_ids}")
        record.prompt_positions += [round(-entry.logprob) for entry in delta.prompt_logprobs or []]
        if delta.finish_reason is not None:
            record.finish = delta
            self._live.pop(delta.request_id, None)
            self._check_finish(record, delta)

    def _check_finish(self, record: Record, delta: RequestDelta) -> None:
        source = record.source
        if delta.finish_reason is FinishReason.ERROR:
            if delta.error is None:
                raise SimFault("an error without a record")
            self.counts[f"error {delta.error.code}"] += 1
            if delta.error.code == "non_finite_logits":
                demand(record.fails_at == len(record.output_ids), f"failed after {len(record.output_ids)} tokens")
            return
        expected = record.expected
        demand(record.fails_at is None or record.fails_at >= len(expected.output_ids), "a fault was not reported")
        demand(record.output_ids == expected.output_ids, f"{source.request_id} ended early")
        same = (delta.finish_reason, delta.stop_token_id) == (expected.reason, expected.stop_token_id)
        demand(same, f"{source.request_id} ended by {delta.finish_reason}, {delta.stop_token_id}")
        self.counts[f"finish {expected.reason.text}"] += 1
        computed = source.produced_token_ids != expected.output_ids
        if computed and source.sampling.prompt_logprobs is not None:
            wanted = list(range(1, len(source.prompt_token_ids)))
            demand(record.prompt_positions == wanted, f"prompt log-probabilities of {record.prompt_positions}")
            demand(delta.cached_tokens == 0, "hits in spite of prompt log-probabilities")

    def _check_end(self) -> None:
        for request_id, record in self.records.items():
            demand(record.finish is not None or record.aborted, f"{request_id} never ended")
        demand(not self.device.slots, f"slots {list(self.device.slots)} were never released")
        for group in self.scheduler.kv.groups:
            demand(group.pool.free_blocks == group.pool.total_blocks, "blocks leaked")
            self.counts["evictions"] += group.pool.evicted_blocks
        self.counts["slots reused in one plan"] += self.device.reused_slots
        self.counts["steps"] += self.device.executed_steps

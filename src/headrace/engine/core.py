"""The engine core: schedule -> submit -> collect -> apply, one step at a time.

A plain object driven by whoever owns it (the core process, the offline class, tests). Must not know sockets, signals or
asyncio, and never waits for anything but the executor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError, InsufficientMemoryError, invariant
from headrace.base.ids import RequestId
from headrace.config import EngineConfig
from headrace.kv.budget import capacity_tokens, group_need_blocks, make_layout
from headrace.kv.events import BlockStored, KvEvent
from headrace.observe.startup import StartupTable
from headrace.sched.scheduler import Scheduler
from headrace.types.cache_specs import KvLayout
from headrace.types.events import AddRequest, InboxEvent
from headrace.types.outputs import SchedulerStats, StepNews
from headrace.types.plans import StepPlan
from headrace.types.results import StepResult
from headrace.types.wire import CoreReady, StepOutputs, outputs_of
from headrace.types.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from headrace.parallel.executor import Executor


class EngineCore:
    """Scheduler and executor, and the loop body that joins them.

    Args:
        config: the whole engine configuration, already checked.
        executor: runs plans in the order of submission.
        clock: monotonic seconds for the scheduler.
        startup: table that gets a row for each phase of `start`; a fresh one if not given.
        record: told which requests are about to be touched, before anything that may crash on them.
        publish: given the events of the prefix cache after each step that has any; None records none.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        *,
        startup: StartupTable | None = None,
        record: Callable[[Iterable[RequestId]], None] | None = None,
        publish: Callable[[Sequence[KvEvent]], None] | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._clock = clock
        self._startup = startup if startup is not None else StartupTable("engine core", age_s=0.0)
        self._record = record
        self._publish = publish
        self._inbox: list[InboxEvent] = []
        self._in_flight: deque[StepPlan] = deque()
        self._scheduler: Scheduler | None = None
        self.layout: KvLayout | None = None
        self.facts: WorkerFacts | None = None

    def start(self) -> CoreReady:
        """Load the model, size and allocate the KV cache, make the scheduler.

        Returns:
            The facts that the front end needs.

        Raises:
            HeadraceError: the model cannot be loaded or does not fit; the message says what to change.
        """
        facts = self._executor.start()
        self._startup.mark_parts(facts.phases, "import torch and the worker")
        wanted = self._config.model.max_model_len
        if wanted is not None and wanted > facts.max_position:
            raise ConfigError(
                f"--max-model-len {wanted} is above the {facts.max_position} positions of the model; lower it",
                param="max_model_len",
            )
        cache = self._config.cache
        layout = make_layout(
            facts.layer_caches,
            block_tokens=cache.block_size,
            bytes_available=cache.kv_cache_memory_bytes or facts.cache_bytes,
            num_blocks_override=cache.num_blocks_override,
            max_model_len=wanted or facts.max_position,
        )
        limits = self._config.scheduler
        steps = {"batch_tokens": limits.max_num_batched_tokens, "in_flight": limits.steps_in_flight}
        max_model_len = fit_model_len(wanted, facts.max_position, layout, **steps)
        self._executor.allocate(layout)
        self._scheduler = Scheduler(
            self._config.scheduler,
            layout=layout,
            max_model_len=max_model_len,
            enable_prefix_caching=cache.enable_prefix_caching,
            hash_seed=cache.prefix_hash_seed,
            hash_tokens=cache.prefix_hash_tokens,
            checkpoint_tokens=cache.checkpoint_interval_tokens,
            eviction=cache.eviction,
            record_events=self._publish is not None,
        )
        self.layout, self.facts = layout, facts
        self._startup.mark("kv cache")
        return CoreReady(
            pid=os.getpid(),
            max_model_len=max_model_len,
            vocab_tokens=facts.vocab_tokens,
            block_tokens=cache.block_size,
            layout=layout,
            startup=self._startup.rows,
            hash_tokens=self._scheduler.hash_block_tokens,
            capacity_tokens=capacity_tokens(layout, **steps),
        )

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._inbox or self._in_flight) or self._require_scheduler().has_work

    def stats(self) -> SchedulerStats:
        """Return the scheduler's numbers."""
        return self._require_scheduler().stats()

    def kv_snapshot(self) -> list[BlockStored]:
        """Return an event for everything that can be hit now."""
        return self._require_scheduler().kv.snapshot()

    def post(self, event: InboxEvent) -> None:
        """Put an event into the inbox; the next step takes it.

        Mutates: the inbox only.
        """
        self._inbox.append(event)

    def step(self) -> StepOutputs:
        """Run one step: take the inbox, make and submit a plan, apply the oldest result that is due.

        With ``steps_in_flight`` 2 the plan of this step is submitted before the previous result is applied. A plan
        without work never overlaps: everything in flight is applied first, so that idle means nothing is open.

        Returns:
            The news of this step.

        Raises:
            HeadraceError: the executor failed. The core cannot be used after that.

        Mutates: scheduler, KV block tables, executor.
        """
        scheduler = self._require_scheduler()
        inbox, self._inbox = self._inbox, []
        self._note_arrivals(inbox)
        plan = scheduler.schedule(inbox, self._clock.now_s())
        self._in_flight.append(plan)
        self._note_plans()
        if not _is_empty(plan):
            self._executor.submit(plan)
        limit = 0 if not (plan.decodes or plan.rows) else self._config.scheduler.steps_in_flight - 1
        news: list[StepNews] = []
        while len(self._in_flight) > limit:
            oldest = self._in_flight[0]
            result = StepResult(oldest.step, []) if _is_empty(oldest) else self._executor.collect()
            invariant(result.step == oldest.step, f"result of step {result.step} in place of step {oldest.step}")
            self._in_flight.popleft()
            news.append(scheduler.apply(oldest, result, self._clock.now_s()))
        if self._publish is not None:
            self._publish(scheduler.take_events())
        return outputs_of(news, scheduler.stats())

    def close(self) -> None:
        """Release the executor; safe to call twice."""
        self._executor.close()

    def _note_arrivals(self, inbox: list[InboxEvent]) -> None:
        if self._record is not None:
            arrivals = [event.request.request_id for event in inbox if isinstance(event, AddRequest)]
            if arrivals:
                self._record([*self._require_scheduler().planned_ids(), *arrivals])

    def _note_plans(self) -> None:
        if self._record is not None:
            self._record(self._require_scheduler().planned_ids())

    def _require_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise ConfigError("the engine core is not started: call start() first")
        return self._scheduler


def fit_model_len(wanted: int | None, max_position: int, layout: KvLayout, *, batch_tokens: int, in_flight: int) -> int:
    """Return the longest sequence (tokens) that requests may reach.

    Args:
        wanted: the user's ``max_model_len``, or None.
        max_position: positions of the model.
        layout: the KV cache as it will be allocated.
        batch_tokens: most tokens that a step computes of one sequence.
        in_flight: plans made before the first result is applied.

    Raises:
        InsufficientMemoryError: the user's length does not fit into the cache, or not even two tokens do.
    """
    capacity = capacity_tokens(layout, batch_tokens=batch_tokens, in_flight=in_flight)
    length = wanted if wanted is not None else min(max_position, capacity)
    if length <= capacity and length >= 2:
        return length
    have, shortest = layout.total_bytes(), max(length, 2)
    needed = sum(
        group_need_blocks(group, shortest, batch_tokens=batch_tokens, in_flight=in_flight)
        * group.block_granules
        * layout.granule_bytes
        for group in layout.groups
    )
    raise InsufficientMemoryError(
        f"the KV cache of {have / 2**20:.1f} MiB holds {capacity} tokens, but one sequence of {shortest} tokens "
        f"needs {needed / 2**20:.1f} MiB; lower --max-model-len to {capacity} or raise "
        "--kv-cache-memory-bytes",
        param="max_model_len",
    )


def _is_empty(plan: StepPlan) -> bool:
    # Everything but the step's number is a list of work.
    return not any(msgspec.structs.astuple(plan)[1:])

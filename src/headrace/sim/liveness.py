"""Somebody always makes progress, and nobody waits for ever or for nothing.

Must not assume how the scheduler decides, only what it owes to those who wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.ids import RequestId
from headrace.sched.request import Request
from headrace.sim.cells import demand
from headrace.sim.setup import SimSetup
from headrace.types.plans import StepPlan

if TYPE_CHECKING:
    from headrace.sim.core import SimCore

MOST_EMPTY_PLANS = 3
"""Plans in a row without work, while somebody could work; twice as many if two are in flight."""

LONGEST_AT_HEAD_STEPS = 600
"""Steps that a request may stand at the head of the queue while others run."""


class Liveness:
    """Watches plans for standstill and starvation."""

    def __init__(self, setup: SimSetup) -> None:
        """Begin.

        Args:
            setup: sizes and options.
        """
        self._setup = setup
        self._empty_plans = 0
        self._head: RequestId | None = None
        self._head_steps = 0

    def crashed(self) -> None:
        """Everything begins anew."""
        self._empty_plans = self._head_steps = 0
        self._head = None

    def after_schedule(self, core: SimCore, plan: StepPlan, *, preempted: bool) -> None:
        """Judge a plan that was just made.

        Args:
            core: with the plan.
            plan: the plan.
            preempted: somebody was preempted for it; then nobody may start.
        """
        running, ready = core.running, core.ready()
        idle = not (running or ready) or bool(core.open_jobs())
        if plan.total_tokens or plan.loads or idle:
            self._empty_plans = 0
        else:
            self._empty_plans += 1
            names = [request.request_id for request in [*running, *ready]]
            most = MOST_EMPTY_PLANS * self._setup.scheduler.steps_in_flight
            demand(self._empty_plans < most, f"{names} could run, and nothing is planned")
        if not ready:
            self._head = None
            return
        self._watch_head(ready[0])
        if not preempted and not ready[0].source.media:
            self._check_room(core, plan, ready[0])

    def _watch_head(self, head: Request) -> None:
        if head.request_id != self._head:
            self._head, self._head_steps = head.request_id, 0
        self._head_steps += 1
        demand(self._head_steps < LONGEST_AT_HEAD_STEPS, f"{head.request_id} starves at the head of the queue")

    def _check_room(self, core: SimCore, plan: StepPlan, head: Request) -> None:
        """Nobody waits if all who run, and he too, could grow to their limits side by side."""
        config, kv = self._setup.scheduler, core.scheduler.kv
        running = core.running
        if plan.total_tokens >= config.max_num_batched_tokens or len(running) >= config.max_num_seqs:
            return
        kept = [int(config.watermark * pool.most_blocks) + 1 for pool in kv.memory.pools]
        for request in core.holders():
            for index, blocks in enumerate(kv.missing_blocks(request.kv, request.limit_tokens)):
                kept[index] += blocks
        if any(request.kv.alone for request in [head, *core.holders()]):
            return
        # A hit may pin memory that another group needs, so there must be room with it and without.
        if kv.has_free(kv.demand_blocks(kv.no_hit(), head.limit_tokens, head.kv), kept):
            hit = kv.find_hit(head.kv, head.token_ids)
            room = kv.has_free(kv.demand_blocks(hit, head.limit_tokens, head.kv), kept, hit)
            demand(not room, f"{head.request_id} waits although everything for it is free")

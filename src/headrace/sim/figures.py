"""The scheduler's running totals and counts, held against what plans and news have shown.

Must not count what it cannot see from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from headrace.base.ids import RequestId
from headrace.sched.request import REMOTE, RequestState
from headrace.sched.scheduler import Scheduler
from headrace.sim.cells import demand
from headrace.types.outputs import StepNews
from headrace.types.plans import LoadJob, StepPlan


class Figures:
    """What the figures of one core must be.

    Attributes:
        began: tokens that each request found in the cache when it took its slot last.
    """

    def __init__(self, *, has_store: bool) -> None:
        """Begin at zero.

        Args:
            has_store: then a start may be taken back in the step that plans it, and is counted all the same.
        """
        self._totals: Counter[str] = Counter()
        self._names = ["generation_tokens", "checkpoints", "preemptions"]
        if not has_store:
            self._names += ["prompt_tokens", "prefix_query_tokens", "prefix_hit_tokens"]
        self.began: dict[RequestId, int] = {}
        self._loads: dict[RequestId, tuple[int, int]] = {}

    def planned(self, plan: StepPlan, loading: Set[RequestId]) -> None:
        """Count a plan.

        Args:
            plan: just made.
            loading: who had blocks without a slot before it was made.
        """
        totals = self._totals
        for start in plan.starts:
            if start.request_id not in self.began:
                totals["prompt_tokens"] += start.prompt_tokens
                totals["prefix_query_tokens"] += len(start.token_ids)
                totals["prefix_hit_tokens"] += start.computed_tokens
            first_tokens, end_tokens = self._loads.pop(start.request_id, (0, -1))
            # What a load has brought is published when it comes, so it counts like what was computed.
            from_load = start.request_id in loading and start.computed_tokens == end_tokens
            self.began[start.request_id] = first_tokens if from_load else start.computed_tokens
        totals["checkpoints"] += len(plan.saves)

    def loaded(self, job: LoadJob) -> None:
        """Note a load of which everything is good."""
        self._loads[job.request_id] = (job.start_tokens, job.end_tokens)

    def preempted(self, requests: int) -> None:
        """Count who lost blocks."""
        self._totals["preemptions"] += requests

    def told(self, news: StepNews) -> None:
        """Count the tokens of a step."""
        more = sum(len(delta.new_token_ids) for delta in news.deltas)
        self._totals["generation_tokens"] += len(news.token_ids) + more

    def check(self, scheduler: Scheduler) -> None:
        """Compare with the scheduler's own.

        Requires: called after `planned`, `preempted` and `told` have seen all there is.
        """
        stats = scheduler.stats()
        for name in self._names:
            told, seen = getattr(stats, name), self._totals[name]
            demand(told == seen, f"{name}: {told} are counted, {seen} were seen")
        pools = scheduler.kv.memory.pools
        blocks = (sum(pool.total_blocks for pool in pools), sum(pool.free_blocks for pool in pools))
        demand((stats.blocks_total, stats.blocks_free) == blocks, f"{stats.blocks_free} blocks are free, not {blocks}")
        states = Counter(request.state for request in scheduler.waiting)
        demand((stats.running, stats.waiting) == (len(scheduler.running), states.total()), "who runs and waits")
        parked = (stats.waiting_grammar, stats.waiting_leader, stats.waiting_quota, stats.waiting_lookup)
        places = (RequestState.GRAMMAR, RequestState.LEADER, RequestState.QUOTA, RequestState.LOOKUP)
        demand(parked == tuple(states[place] for place in places), f"parked requests: {parked}, there are {states}")
        loads = sum(states[place] for place in REMOTE)
        demand(stats.waiting_load == loads, f"{stats.waiting_load} wait for a load, there are {loads}")

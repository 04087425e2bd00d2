"""What a run has reached: states and moves of requests, and what happened to each kind of cache.

Must not check anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.base.ids import NULL_BLOCK, RequestId
from headrace.sched.request import REMOTE, Request, RequestState
from headrace.sim.setup import SimSetup
from headrace.types.events import AbortRequest, InboxEvent
from headrace.types.plans import SlotStart, StepPlan


class StateWatch:
    """Follows the states of all requests from call to call."""

    def __init__(self, counts: Counter[str]) -> None:
        """Begin.

        Args:
            counts: where the findings go.
        """
        self._counts = counts
        self._states: dict[RequestId, RequestState] = {}

    def crashed(self) -> None:
        """All requests are gone."""
        for state in self._states.values():
            self._counts[f"crashed while {state.name.lower()}"] += 1
        self._states.clear()

    def before_schedule(self, inbox: Sequence[InboxEvent]) -> None:
        """Count who is aborted in which state."""
        for event in inbox:
            if isinstance(event, AbortRequest) and event.request_id in self._states:
                self._counts[f"aborts {self._states[event.request_id].name.lower()}"] += 1

    def after_schedule(self, requests: Sequence[Request], *, ahead: bool) -> int:
        """Count what a plan has done to requests.

        Args:
            requests: all, after it.
            ahead: another plan is in flight.

        Returns:
            How many were preempted.
        """
        lost, before = RequestState.PREEMPTED, self._states
        preempted = sum(request.state is lost and before.get(request.request_id) is not lost for request in requests)
        self._counts["preemptions"] += preempted
        self._counts["preempted in flight"] += preempted if ahead else 0
        self._move(requests)
        return preempted

    def plan(self, plan: StepPlan, setup: SimSetup, *, ahead: bool) -> None:
        """Count what a plan does to memory.

        Args:
            plan: just made.
            setup: kinds and sizes.
            ahead: another plan is in flight.
        """
        counts, kinds = self._counts, setup.kinds
        for start in plan.starts:
            if start.computed_tokens:
                self._count_hit(start, plan, setup)
        for copy in plan.copies:
            counts[f"copied {kinds[copy.group]}"] += 1
        counts["checkpoints saved"] += len(plan.saves)
        counts["checkpoints saved ahead"] += len(plan.saves) if ahead else 0
        counts["rows with drafts"] += sum(row.drafts > 0 for row in plan.rows)
        counts["gated rows"] += sum(row.gated for row in plan.rows)
        counts["loads"] += len(plan.loads)

    def _count_hit(self, start: SlotStart, plan: StepPlan, setup: SimSetup) -> None:
        counts, tokens = self._counts, start.computed_tokens
        counts["hits"] += 1
        counts["hit tokens"] += tokens
        from_store = self._states.get(start.request_id) in REMOTE
        copied = {(copy.group, copy.target) for copy in plan.copies}
        for group, (kind, table) in enumerate(zip(setup.kinds, start.blocks, strict=True)):
            counts[f"hit {kind}"] += 1
            counts[f"hit {kind} behind null blocks"] += NULL_BLOCK in table
            size = setup.layout.groups[group].block_tokens
            if kind in ("full", "latent") and tokens % size and not from_store:
                counts["tails taken over"] += (group, table[tokens // size]) not in copied

    def after_apply(self, requests: Sequence[Request]) -> None:
        """Count what a result has done to requests."""
        self._move(requests)

    def _move(self, requests: Sequence[Request]) -> None:
        now = {request.request_id: request.state for request in requests}
        before, counts = self._states, self._counts
        if now == before:
            return
        for request_id, state in now.items():
            old = before.get(request_id)
            if old is not state:
                name = state.name.lower()
                counts[f"state {name}"] += 1
                counts[f"{old.name.lower() if old else 'new'} -> {name}"] += 1
        for request_id, old in before.items():
            if request_id not in now:
                counts[f"{old.name.lower()} -> finished"] += 1
        self._states = now


def count_layout(counts: Counter[str], setup: SimSetup) -> None:
    """Count which kinds a run has."""
    for kind in set(setup.kinds):
        counts[f"runs with {kind}"] += 1

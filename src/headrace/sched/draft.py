"""A step while it is being planned, and after that while its result is awaited.

Must not choose anything; it keeps plan and requests in step with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.base.errors import invariant
from headrace.base.ids import RequestId, Slot, StepId
from headrace.sched.request import Request
from headrace.types.plans import BlockAppend, PlanRow, SlotStart, StepPlan


@dataclass
class Flight:
    """A plan whose result has not been applied.

    Attributes:
        plan: what the worker got.
        requests: owner of each row of the plan.
        tokens: to be computed in this step.
        started_s: when it was planned.
        preempted_ids: requests that lost their blocks since: their rows no longer tell of any KV they own.
    """

    plan: StepPlan
    requests: list[Request]
    tokens: int
    started_s: float
    preempted_ids: set[RequestId] = field(default_factory=set)


class StepDraft:
    """The growing plan of one step.

    Attributes:
        budget_tokens: tokens that may still be planned.
        releases: slots given back.
        starts: slots taken.
        appends: growth of block tables.
        rows: work so far.
        requests: owner of each row.
        preempted: some request was preempted in this step.
    """

    __slots__ = ("appends", "budget_tokens", "preempted", "releases", "requests", "rows", "starts", "step")

    def __init__(self, step: StepId, budget_tokens: int, releases: list[Slot]) -> None:
        self.step = step
        self.budget_tokens = budget_tokens
        self.releases = releases
        self.starts: list[SlotStart] = []
        self.appends: list[BlockAppend] = []
        self.rows: list[PlanRow] = []
        self.requests: list[Request] = []
        self.preempted = False

    def add_row(self, request: Request, tokens: int) -> None:
        """Plan the next tokens of a request.

        Args:
            request: a running one with room in its blocks.
            tokens: from 1 to what it has left to compute.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        slot, start = request.slot, request.planned_tokens
        invariant(slot is not None and tokens > 0, f"request {request.request_id} cannot have a row")
        sample = start + tokens == request.known_tokens
        self.rows.append(PlanRow(slot, request.request_id, start, tokens, sample))  # type: ignore[arg-type]
        self.requests.append(request)
        self.budget_tokens -= tokens
        request.planned_tokens = start + tokens
        request.known_tokens += sample

    def remove(self, request: Request) -> None:
        """Take back everything planned for a running request in this step: row, block growth and budget.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        self.appends = [append for append in self.appends if append.slot != request.slot]
        if request not in self.requests:
            return
        place = self.requests.index(request)
        row = self.rows.pop(place)
        del self.requests[place]
        self.budget_tokens += row.tokens
        request.planned_tokens -= row.tokens
        request.known_tokens -= row.sample

    def plan(self) -> StepPlan:
        """Return the finished plan."""
        return StepPlan(self.step, self.releases, self.starts, self.appends, self.rows)

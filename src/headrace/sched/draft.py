"""A step while it is being planned, and after that while its result is awaited.

Must not choose anything; it keeps plan and requests in step with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.base.errors import InvariantError, invariant
from headrace.base.ids import RequestId, Slot, StepId
from headrace.sched.request import Request
from headrace.types.plans import BlockAppend, BlockCopy, PlanRow, SlotStart, StepPlan


@dataclass
class Flight:
    """A plan whose result has not been applied.

    Attributes:
        plan: what the worker got.
        requests: owner of each row of the plan.
        decoding: owner of each slot of ``plan.decodes``.
        tokens: to be computed in this step.
        started_s: when it was planned.
        preempted_ids: requests that lost their blocks since: their rows no longer tell of any KV they own.
    """

    plan: StepPlan
    requests: list[Request]
    decoding: list[Request]
    tokens: int
    started_s: float
    preempted_ids: set[RequestId] = field(default_factory=set)


def owned_slot(request: Request) -> Slot:
    """Return the slot of a running request.

    Raises:
        InvariantError: it has none.
    """
    if request.slot is None:
        raise InvariantError(f"request {request.request_id} has no slot")
    return request.slot


class StepDraft:
    """The growing plan of one step.

    Attributes:
        budget_tokens: tokens that may still be planned.
        releases: slots given back.
        starts: slots taken.
        appends: growth of block tables.
        rows: work so far.
        requests: owner of each row.
        decodes: slots that compute their last known token and want nothing else.
        decoding: owner of each of them.
        copies: blocks to copy before anything is computed.
        saves: blocks to copy after everything is computed.
        preempted: some request was preempted in this step.
    """

    __slots__ = (
        "appends",
        "budget_tokens",
        "copies",
        "decodes",
        "decoding",
        "preempted",
        "releases",
        "requests",
        "rows",
        "saves",
        "starts",
        "step",
    )

    def __init__(self, step: StepId, budget_tokens: int, releases: list[Slot]) -> None:
        self.step = step
        self.budget_tokens = budget_tokens
        self.releases = releases
        self.starts: list[SlotStart] = []
        self.appends: list[BlockAppend] = []
        self.rows: list[PlanRow] = []
        self.requests: list[Request] = []
        self.decodes: list[Slot] = []
        self.decoding: list[Request] = []
        self.copies: list[BlockCopy] = []
        self.saves: list[BlockCopy] = []
        self.preempted = False

    def add_start(self, request: Request) -> None:
        """Tell the worker that a request takes a slot.

        Everything is copied: tokens and tables go on growing here while the worker reads the plan.

        Args:
            request: just started, with slot and blocks.

        Mutates: the draft.
        """
        source = request.source
        self.starts.append(
            SlotStart(
                slot=owned_slot(request),
                request_id=request.request_id,
                token_ids=request.token_ids[:],
                prompt_tokens=request.prompt_tokens,
                computed_tokens=request.planned_tokens,
                blocks=[list(table) for table in request.kv.tables],
                sampling=source.sampling,
                eos_token_ids=source.eos_token_ids,
                bad_words_token_ids=source.bad_words_token_ids,
            )
        )

    def add_row(self, request: Request, tokens: int) -> None:
        """Plan the next tokens of a request.

        Args:
            request: a running one with room in its blocks.
            tokens: from 1 to what it has left to compute.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        start = request.planned_tokens
        invariant(tokens > 0, f"request {request.request_id} has nothing to compute")
        sample = start + tokens == request.known_tokens
        self.rows.append(PlanRow(owned_slot(request), request.request_id, start, tokens, sample))
        self.requests.append(request)
        self.budget_tokens -= tokens
        request.planned_tokens = start + tokens
        request.known_tokens += sample

    def remove(self, request: Request) -> None:
        """Take back everything planned for a running request in this step: row, block growth and budget.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        self.appends = [append for append in self.appends if append.slot != request.slot]
        if request in self.decoding:
            place = self.decoding.index(request)
            del self.decodes[place], self.decoding[place]
            self.budget_tokens += 1
            request.planned_tokens -= 1
            request.known_tokens -= 1
            return
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
        return StepPlan(
            self.step, self.releases, self.starts, self.appends, self.rows, self.decodes, self.copies, self.saves
        )

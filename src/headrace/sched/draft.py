"""A step while it is being planned, and after that while its result is awaited.

Must not choose anything; it keeps plan and requests in step with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from headrace.base.errors import InvariantError, invariant
from headrace.base.ids import RequestId, Slot, StepId
from headrace.sched.encoding import EncoderWork
from headrace.sched.request import Request
from headrace.types.plans import BlockAppend, BlockCopy, LoadJob, PlanRow, SlotStart, StepPlan


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
        loads: transfers to begin.
        ended: requests whose row ends where a checkpoint may be worth its block, maybe taken back since.
        shortened: long prompts that have got a share and would take more, in order.
        preempted: some request was preempted in this step.
    """

    __slots__ = (
        "appends",
        "budget_tokens",
        "copies",
        "decodes",
        "decoding",
        "ended",
        "loads",
        "preempted",
        "releases",
        "requests",
        "rows",
        "saves",
        "shortened",
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
        self.ended: list[Request] = []
        self.copies: list[BlockCopy] = []
        self.saves: list[BlockCopy] = []
        self.loads: list[LoadJob] = []
        self.shortened: list[Request] = []
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
                media=source.media,
                encoder_tokens=source.encoder_tokens,
            )
        )

    def add_row(self, request: Request, tokens: int, drafts: int = 0) -> None:
        """Plan the next tokens of a request.

        Args:
            request: a running one with room in its blocks.
            tokens: from 1 to what it has left to compute, drafts not counted.
            drafts: guesses behind the last known token; only a row that reaches it has any.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        start = request.planned_tokens
        invariant(tokens > 0, f"request {request.request_id} has nothing to compute")
        sample = start + tokens == request.known_tokens
        invariant(sample or not drafts, f"request {request.request_id} guesses before it knows its last token")
        gated = sample and request.gated
        self.rows.append(
            PlanRow(owned_slot(request), request.request_id, start, tokens + drafts, sample, drafts, gated)
        )
        self.requests.append(request)
        self.budget_tokens -= tokens + drafts
        request.planned_tokens = start + tokens + drafts
        request.known_tokens += sample

    def extend_row(self, request: Request, tokens: int) -> None:
        """Lengthen the row of a request that does not sample yet.

        Args:
            request: has a row in this step, and room in its blocks.
            tokens: more to compute, at most what it lacks.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        place = self.requests.index(request)
        row = self.rows[place]
        invariant(not row.sample, f"the row of {request.request_id} is complete")
        request.planned_tokens += tokens
        sample = request.planned_tokens == request.known_tokens
        self.rows[place] = msgspec.structs.replace(
            row, tokens=row.tokens + tokens, sample=sample, gated=sample and request.gated
        )
        self.budget_tokens -= tokens
        request.known_tokens += sample

    def remove(self, request: Request) -> bool:
        """Take back everything planned for a running request in this step: start, row, block growth and budget.

        Returns:
            True if its slot was taken in this very step, so that the worker knows nothing of it.

        Mutates: ``request`` (planned and known tokens), the draft.
        """
        self.appends = [append for append in self.appends if append.slot != request.slot]
        started = len(self.starts)
        self.starts = [start for start in self.starts if start.request_id != request.request_id]
        if request in self.shortened:
            self.shortened.remove(request)
        if request in self.decoding:
            place = self.decoding.index(request)
            del self.decodes[place], self.decoding[place]
            self.budget_tokens += 1
            request.planned_tokens -= 1
            request.known_tokens -= 1
        elif request in self.requests:
            place = self.requests.index(request)
            row = self.rows.pop(place)
            del self.requests[place]
            self.budget_tokens += row.tokens
            request.planned_tokens -= row.tokens
            request.known_tokens -= row.sample
        return len(self.starts) < started

    def plan(self, encoder: EncoderWork | None) -> StepPlan:
        """Return the finished plan.

        Args:
            encoder: what encoders do in this step, or None without any.
        """
        return StepPlan(
            self.step,
            self.releases,
            self.starts,
            self.appends,
            self.rows,
            self.decodes,
            self.copies,
            self.saves,
            encoder.encodes if encoder else [],
            encoder.frees if encoder else [],
            self.loads,
        )

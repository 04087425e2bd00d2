"""The pass over waiting requests: who starts, with which hit, and what must stay free for those that run already.

Waiting requests start in order. Lack of memory or of slots stops the pass, so that nobody overtakes the first into
memory that it waits for; what else keeps a request from starting (quota, a store that is still looking, no room for its
encoder outputs) only passes it over. Must not preempt: in a step in which somebody was preempted it is not run at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.kv.sequence import Hit
from headrace.sched.draft import StepDraft
from headrace.sched.encoding import EncoderFit
from headrace.sched.quotas import Quotas
from headrace.sched.remote import RemoteOffer
from headrace.sched.request import Request, RequestState
from headrace.sched.reserve import Claims, FutureUse
from headrace.sched.roster import Roster
from headrace.sched.running import RunningPass
from headrace.sched.shares import PrefillBudget

MOST_PASSED_OVER = 8
"""Requests looked up in one pass that find no room for their encoder outputs; each look-up grows with its prompt."""


class StartingPass:
    """Starts waiting requests."""

    def __init__(self, roster: Roster, running: RunningPass, future: FutureUse, quotas: Quotas) -> None:
        """Keep what it needs.

        Args:
            roster: requests and memory.
            running: plans the first row.
            future: what must stay free.
            quotas: of tenants.
        """
        self._roster = roster
        self._kv = roster.kv
        self._running = running
        self._future = future
        self._quotas = quotas
        # The head of the queue at its last look-up, if it did not fit, and the blocks per group that it asked for.
        self._blocked: tuple[Request, list[int]] | None = None

    def resume_arrived(self, draft: StepDraft, now_s: float) -> None:
        """Give slots to requests whose load has arrived: they hold blocks, so they go before the queue.

        They have no row yet; the pass over running requests plans it like any other.

        Mutates: requests, slots, ``draft``.
        """
        roster = self._roster
        if roster.remote is None:
            return
        for request in sorted(roster.arrived, key=lambda request: request.order_key):
            if not roster.free_slots:
                break
            roster.remote.resumed(request)
            request.move_to(RequestState.RUNNING)
            roster.take_slot(request, request.computed_tokens, now_s)
            draft.add_start(request)

    def others_wait(self) -> bool:
        """Return whether a waiting request could have a slot, as far as that can be told without a look-up."""
        roster = self._roster
        return bool(roster.free_slots and len(roster.queue)) and (
            self._blocked is None or self._blocked[0] is not roster.queue.at(0)
        )

    def forget(self, request: Request) -> None:
        """Forget that a request did not fit: it has ended.

        Mutates: the note on the head of the queue.
        """
        if self._blocked is not None and self._blocked[0] is request:
            self._blocked = None

    def run(self, draft: StepDraft, now_s: float, prefilling: int) -> None:
        """Start waiting requests in order until one does not fit.

        Args:
            draft: the step; nobody was preempted in it.
            now_s: monotonic seconds.
            prefilling: running requests that compute a prompt.

        Mutates: requests, blocks, slots, ``draft``.
        """
        roster, queue = self._roster, self._roster.queue
        claims: Claims | None = None
        prefill_tokens = draft.budget_tokens
        place = passed = 0
        holders: list[Request] = []
        while place < len(queue) and roster.free_slots and draft.budget_tokens and passed < MOST_PASSED_OVER:
            request = queue.at(place)
            # Nobody but those started here gets blocks, and nobody loses any.
            holders = holders or roster.holders()
            if holders and (request.kv.alone or (len(holders) == 1 and holders[0].kv.alone)):
                # It fits into empty memory only, so it neither joins anybody nor is joined.
                break
            if not self._quotas.allows(request, holders):
                roster.totals.quota_skips += 1
                roster.gates.park_for_quota(request, request.source.tenant or "")
                continue
            if claims is None:
                claims = self._future.claims(holders)
            kept_blocks = claims.kept_blocks(request) if holders else []
            if self._is_still_blocked(request, kept_blocks):
                break
            offer = self._offer(request, now_s)
            if offer is None:
                continue
            fitting = self._fitting(request, offer, kept_blocks, alone=not holders)
            if fitting is None:
                break
            if fitting.external_tokens:
                self._begin_load(request, fitting, draft, now_s)
            else:
                budget = PrefillBudget(prefill_tokens, prefilling=prefilling + 1, others_wait=len(queue) > place + 1)
                tokens, fit = self._running.chunk(request, fitting.hit.tokens, draft, budget)
                if not tokens:
                    place, passed = place + 1, passed + 1
                    continue
                self._start(request, fitting.hit, tokens, fit, draft, now_s)
                prefilling += request.known_tokens > request.planned_tokens
            holders.append(request)
            claims.add(request)

    def _offer(self, request: Request, now_s: float) -> RemoteOffer | None:
        """Return from what a request can start; None if it is parked, because a store must answer or finish first."""
        roster = self._roster
        if request.wants_prompt_logprobs:
            return RemoteOffer(self._kv.no_hit(), 0)
        if roster.remote is None:
            return RemoteOffer(self._kv.find_hit(request.kv, request.token_ids), 0)
        offer = roster.remote.offer(request, now_s)
        if offer is None:
            roster.gates.park_for_store(request, roster.remote.asked_until_s(request))
        elif offer.external_tokens and len(roster.free_slots) <= len(roster.remote.loading) + len(roster.arrived):
            # Every free slot is spoken for by a load; one more would hold memory and wait.
            roster.gates.park_for_store(request, math.inf)
            return None
        return offer

    def _fitting(
        self, request: Request, offer: RemoteOffer, kept_blocks: Sequence[int], *, alone: bool
    ) -> RemoteOffer | None:
        """Return the offer if the whole known sequence fits beside what must stay free; note the head that does not.

        Args:
            request: the first in the queue that may start.
            offer: from what.
            kept_blocks: per group; empty for none.
            alone: nobody else holds blocks.
        """
        demand_blocks = self._demand(request, offer)
        if self._kv.has_free(demand_blocks, kept_blocks, offer.hit):
            return offer
        if alone and not self._roster.open_jobs:
            # Nothing will be freed: its own hit is in the way, because it pins memory that other groups need.
            offer = RemoteOffer(self._kv.no_hit(), 0)
            demand_blocks = self._demand(request, offer)
            if self._kv.has_free(demand_blocks, kept_blocks, offer.hit):
                return offer
        self._blocked = (request, demand_blocks)
        self._kv.watch(() if request.wants_prompt_logprobs else request.kv.hashes)
        return None

    def _demand(self, request: Request, offer: RemoteOffer) -> list[int]:
        return self._kv.demand_blocks(
            offer.hit, request.known_tokens, request.kv, external_tokens=offer.external_tokens
        )

    def _is_still_blocked(self, request: Request, kept_blocks: Sequence[int]) -> bool:
        """Return True if the request did not fit at its last look-up and cannot fit now, without looking up again.

        A look-up grows with the prompt, and a full cache keeps the head of the queue waiting for many steps. What it
        asks for cannot shrink as long as none of its blocks is published and nobody else is started.
        """
        if self._blocked is None or self._blocked[0] is not request or self._kv.watched_published:
            return False
        return not self._kv.has_free(self._blocked[1], kept_blocks)

    def _begin_load(self, request: Request, offer: RemoteOffer, draft: StepDraft, now_s: float) -> None:
        """Give a request blocks and let the store fill them. It has neither slot nor row until they have arrived."""
        remote = self._roster.remote
        invariant(remote is not None, "an offer of an outside store without one")
        if remote is not None:
            self._roster.queue.remove(request)
            draft.loads.append(remote.plan_load(request, offer, now_s))
            request.move_to(RequestState.LOADING)
            self._blocked = None

    def _start(
        self, request: Request, hit: Hit, tokens: int, fit: EncoderFit | None, draft: StepDraft, now_s: float
    ) -> None:
        invariant(request.known_tokens == len(request.token_ids), f"{request.request_id} resumes with a step in flight")
        self._blocked = None
        self._roster.queue.remove(request)
        draft.copies += self._kv.start(request.kv, hit, hit.tokens + tokens)
        request.move_to(RequestState.RUNNING)
        self._roster.take_slot(request, hit.tokens, now_s)
        draft.add_start(request)
        self._running.add_row(request, tokens, draft, fit)

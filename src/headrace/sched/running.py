"""The pass over running requests: decodes first, then prompts in fair shares; memory is taken from later ones.

Must not start requests or settle results.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.sched.draft import StepDraft, owned_slot
from headrace.sched.encoding import EncoderFit
from headrace.sched.request import Request, RequestState
from headrace.sched.roster import Roster
from headrace.sched.shares import PrefillBudget
from headrace.sched.victims import choose_victim
from headrace.types.plans import BlockAppend


class RunningPass:
    """Plans the work of requests that have a slot."""

    def __init__(self, roster: Roster) -> None:
        """Keep the roster.

        Args:
            roster: requests and memory.
        """
        self._roster = roster
        self._kv = roster.kv
        self._speculative_tokens = roster.config.speculative_tokens

    def plan_decodes(self, draft: StepDraft) -> list[Request]:
        """Plan every running request that lacks one token; return those that lack more.

        This is the hot loop: a fraction of a microsecond a request, and nothing that grows with the context.

        Mutates: ``draft``, requests, blocks.
        """
        prefills: list[Request] = []
        decodes, decoding = draft.decodes, draft.decoding
        counted = 0
        for request in list(self._roster.running.values()):
            known_tokens = request.known_tokens
            if request.planned_tokens + 1 != known_tokens:
                prefills.append(request)
            elif known_tokens < request.quiet_tokens:
                decodes.append(request.slot)  # type: ignore[arg-type]
                decoding.append(request)
                request.planned_tokens = known_tokens
                request.known_tokens = known_tokens + 1
            else:
                # Somebody may be preempted now, and taken out of the draft, so the budget must be right.
                draft.budget_tokens -= len(decodes) - counted
                self._look_at_decode(request, draft)
                counted = len(decodes)
        draft.budget_tokens -= len(decodes) - counted
        return prefills

    def _look_at_decode(self, request: Request, draft: StepDraft) -> None:
        """Plan a decode for which there may be something to do beside: blocks, checkpoints, its end."""
        known_tokens = request.known_tokens
        # At its limit, it only waits for the result of its last sample. A victim of this step is not running.
        if known_tokens >= request.limit_tokens or request.state is not RequestState.RUNNING:
            return
        if known_tokens > request.kv.covered_tokens and not self._grow(request, known_tokens, draft):
            return
        if not request.plain:
            self._plan_other_decode(request, draft)
            return
        draft.decodes.append(owned_slot(request))
        draft.decoding.append(request)
        draft.budget_tokens -= 1
        request.planned_tokens = known_tokens
        request.known_tokens = known_tokens + 1
        if known_tokens >= request.kv.save_at_tokens:
            draft.ended.append(request)
        request.quiet_tokens = min(request.limit_tokens, request.kv.covered_tokens + 1, request.kv.save_at_tokens)

    def plan_prefills(self, draft: StepDraft, prefills: Sequence[Request], *, others_wait: bool) -> int:
        """Plan running requests that lack more than one token; return how many there are.

        Args:
            draft: the step.
            prefills: in the order in which they got their slots; those with nothing to compute now are passed over.
            others_wait: requests wait for a slot that is free.

        Mutates: ``draft``, requests, blocks.
        """
        todo = [request for request in prefills if request.known_tokens > request.planned_tokens]
        budget = PrefillBudget(draft.budget_tokens, prefilling=len(todo), others_wait=others_wait)
        for request in sorted(todo, key=lambda request: request.order_key):
            # The state: an earlier request of this step may have taken this one's blocks.
            if not draft.budget_tokens or request.state is not RequestState.RUNNING:
                continue
            tokens, fit = self.chunk(request, request.planned_tokens, draft, budget)
            if tokens and self._grow(request, request.planned_tokens + tokens, draft):
                self.add_row(request, tokens, draft, fit)
        return len(todo)

    def chunk(
        self, request: Request, start: int, draft: StepDraft, budget: PrefillBudget
    ) -> tuple[int, EncoderFit | None]:
        """Return how many tokens of a request to compute in this step, and the encoder's part in it.

        The cuts, in this order: what it lacks, the option, the budget, its fair share if it is long, the next boundary
        for a checkpoint, the encoder. The last is never rounded; 0 means that it must wait for encoder outputs.

        Args:
            request: running, or about to start.
            start: position of the first token.
            draft: the step; a long prompt that is cut is noted there.
            budget: what all prompts share.
        """
        todo_tokens = request.known_tokens - start
        tokens = min(todo_tokens, self._roster.config.long_prefill_token_threshold or todo_tokens, draft.budget_tokens)
        if tokens > budget.share_tokens and budget.is_long(todo_tokens):
            tokens = budget.share_tokens
            if not request.source.media:
                draft.shortened.append(request)
        tokens = self._kv.next_stop(request.kv, start, start + tokens) - start
        fit = self._encoder_fit(request, start, tokens)
        return (tokens, None) if fit is None else (fit.tokens, fit)

    def add_row(self, request: Request, tokens: int, draft: StepDraft, fit: EncoderFit | None, drafts: int = 0) -> None:
        """Put a row into the plan, with the checkpoints and encoder outputs that belong to it.

        Args:
            request: has a slot and room in its blocks.
            tokens: at least 1, drafts not counted.
            draft: the step.
            fit: of these tokens, if the request has media.
            drafts: guesses of the worker.

        Mutates: ``draft``, ``request``, blocks, the encoder cache.
        """
        draft.add_row(request, tokens, drafts)
        if request.planned_tokens >= request.kv.save_at_tokens:
            draft.ended.append(request)
        if fit is not None and self._roster.encoder is not None:
            self._roster.encoder.take(request.request_id, owned_slot(request), request.source.media, fit)

    def use_the_rest(self, draft: StepDraft) -> None:
        """Give what is left of the budget to the long prompts that were cut, the oldest first. Nobody is preempted.

        Mutates: ``draft``, requests, blocks.
        """
        most_tokens = self._roster.config.long_prefill_token_threshold
        for request in sorted(draft.shortened, key=lambda request: request.order_key):
            if request not in draft.requests:
                continue
            row, end = draft.rows[draft.requests.index(request)], request.planned_tokens
            wanted = min(request.known_tokens - end, draft.budget_tokens)
            if most_tokens:
                wanted = min(wanted, most_tokens - row.tokens)
            if wanted <= 0:
                continue
            # A row that ends at a boundary for a checkpoint stays as it is.
            stop = self._kv.next_stop(request.kv, row.start, end + wanted)
            if stop <= end:
                continue
            blocks = self._kv.grow(request.kv, stop) if stop > request.kv.covered_tokens else []
            if blocks is None:
                continue
            if any(blocks):
                draft.appends.append(BlockAppend(owned_slot(request), blocks))
            draft.extend_row(request, stop - end)
            if stop >= request.kv.save_at_tokens:
                draft.ended.append(request)

    def save(self, draft: StepDraft) -> None:
        """Plan the checkpoints of the rows that end at a boundary, with the memory that all rows have left over.

        Mutates: ``draft``, blocks.
        """
        for request in draft.ended:
            if request.state is RequestState.RUNNING and request.planned_tokens >= request.kv.save_at_tokens:
                draft.saves += self._kv.plan_saves(request.kv, request.planned_tokens)

    def _plan_other_decode(self, request: Request, draft: StepDraft) -> None:
        """Plan a decode that wants more than its token: log-probabilities, a grammar, drafts, media not yet passed."""
        fit = self._encoder_fit(request, request.planned_tokens, 1)
        if fit is not None and not fit.tokens:
            return
        drafts = self._drafts(request, draft)
        if drafts and request.known_tokens + drafts > request.kv.covered_tokens:
            # Guesses are worth a free block and no more.
            blocks = self._kv.grow(request.kv, request.known_tokens + drafts)
            if blocks is None:
                drafts = 0
            elif any(blocks):
                draft.appends.append(BlockAppend(owned_slot(request), blocks))
        self.add_row(request, 1, draft, fit, drafts)

    def _drafts(self, request: Request, draft: StepDraft) -> int:
        """Return how many guesses a decode may carry.

        None while a row still computes the prompt, none that could not be taken (a row brings one token even without
        any, so it never needs the whole distance to the limit), none while the mask of a sample depends on the number
        or the kind of samples before it (``min_tokens``, grammars), and at least a token of budget for all others.
        """
        known_tokens = request.known_tokens
        output_tokens = known_tokens - request.prompt_tokens
        if not self._speculative_tokens or request.gated or output_tokens < max(1, request.min_tokens):
            return 0
        most = min(self._speculative_tokens, request.limit_tokens - known_tokens - 1, draft.budget_tokens - 1)
        return max(0, most)

    def _encoder_fit(self, request: Request, start: int, tokens: int) -> EncoderFit | None:
        media = request.source.media
        if not media or self._roster.encoder is None:
            return None
        return self._roster.encoder.fit(request.request_id, media, start, tokens)

    def _grow(self, request: Request, tokens: int, draft: StepDraft) -> bool:
        """Make room for ``tokens`` tokens, taking blocks from later requests until it fits.

        Returns:
            False if the request has no room in this step: it was the last in order and has lost its own blocks, or it
            waits for jobs that hold the rest.
        """
        while True:
            blocks = self._kv.grow(request.kv, tokens)
            if blocks is not None:
                if any(blocks):
                    draft.appends.append(BlockAppend(owned_slot(request), blocks))
                return True
            takable = [*self._roster.running.values(), *self._roster.arrived]
            # A checkpoint in the making is worth no request's blocks.
            if self._kv.drop_saves([holder.kv for holder in takable]):
                continue
            victim = choose_victim(request, takable, self._kv.missing_blocks(request.kv, tokens), self._kv)
            if victim is not None:
                self._roster.preempt(victim, draft)
                continue
            alone = len(takable) == 1
            if alone and self._roster.open_jobs:
                return False
            # Alone and still without room: its blocks lie scattered over all extents. It starts anew in empty memory.
            invariant(
                not (alone and request.kv.alone),
                f"{request.request_id} was admitted but does not fit into empty memory: {tokens} tokens",
            )
            self._roster.preempt(request, draft, alone=alone)
            return False

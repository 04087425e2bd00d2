"""What the scheduler tells the worker to do in one step.

A plan never carries sampled tokens back: the worker keeps each slot's tokens and appends what it samples, so that a
plan can be made before the previous result is known.
"""

from __future__ import annotations

import msgspec

from headrace.base.ids import BlockId, RequestId, Slot, StepId
from headrace.types.sampling import SamplingParams


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot (first start, or resumption after preemption).

    Attributes:
        slot: free until this plan.
        request_id: who takes it.
        token_ids: prompt and all output tokens known so far.
        prompt_tokens: how many of them are the prompt.
        computed_tokens: tokens whose KV is already in the blocks (prefix hit).
        blocks: block table per group: ``blocks[g]`` covers the tokens from position 0.
        sampling: parameters, seed set.
        eos_token_ids: needed to forbid EOS before ``min_tokens``.
        bad_words_token_ids: forbidden token sequences.
    """

    slot: Slot
    request_id: RequestId
    token_ids: list[int]
    prompt_tokens: int
    computed_tokens: int
    blocks: list[list[BlockId]]
    sampling: SamplingParams
    eos_token_ids: list[int]
    bad_words_token_ids: list[list[int]]


class BlockAppend(msgspec.Struct, frozen=True, array_like=True):
    """New blocks at the end of a running slot's tables: ``blocks[g]`` per group, maybe empty."""

    slot: Slot
    blocks: list[list[BlockId]]


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """Work for one slot in this step.

    Attributes:
        slot: the row of the worker's arrays.
        request_id: owner of the slot, for the result.
        start: position of the first token to compute (= tokens computed before).
        tokens: how many tokens to compute; at least 1.
        sample: True if the row reaches the last known token, so that a new token is sampled from its logits.
    """

    slot: Slot
    request_id: RequestId
    start: int
    tokens: int
    sample: bool


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. The worker does the parts in this order: releases, starts, appends, rows.

    Attributes:
        step: rises by one.
        releases: slots whose request finished, was aborted or preempted.
        starts: requests that take a slot.
        appends: growth of the block tables of running slots.
        rows: what to compute. Empty is legal (only releases).
    """

    step: StepId
    releases: list[Slot]
    starts: list[SlotStart]
    appends: list[BlockAppend]
    rows: list[PlanRow]

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.tokens for row in self.rows)

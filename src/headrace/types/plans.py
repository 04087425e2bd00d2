"""What the scheduler tells the worker to do in one step.

A plan never carries sampled tokens back: the worker keeps each slot's tokens and appends what it samples, so that a
plan can be made before the previous result is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.ids import BlockId, RequestId, Slot, StepId
from headrace.types.requests import MediaSpan
from headrace.types.sampling import SamplingParams


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot (first start, or resumption after preemption).

    Attributes:
        slot: free until this plan.
        request_id: who takes it.
        token_ids: prompt and all output tokens known so far; an array of `types.token_ids`. Bytes only on the wire.
        prompt_tokens: how many of them are the prompt.
        computed_tokens: tokens whose KV is already in the blocks (prefix hit).
        blocks: block table per group: ``blocks[g]`` covers the tokens from position 0; the null block where a group
            keeps nothing. The table of a recurrent group is its one working state.
        sampling: parameters, seed set.
        eos_token_ids: needed to forbid EOS before ``min_tokens``.
        bad_words_token_ids: forbidden token sequences.
        media: spans of the prompt that encoder outputs fill.
        encoder_tokens: length of the encoder's output for cross attention, 0 without.
    """

    slot: Slot
    request_id: RequestId
    token_ids: Sequence[int] | bytes
    prompt_tokens: int
    computed_tokens: int
    blocks: list[list[BlockId]]
    sampling: SamplingParams
    eos_token_ids: list[int]
    bad_words_token_ids: list[list[int]]
    media: list[MediaSpan] = []
    encoder_tokens: int = 0


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
        drafts: the last ``drafts`` of the tokens are guesses that the worker makes itself; it samples up to
            ``drafts + 1`` tokens, and the KV behind the last accepted one is void.
        gated: the row's sampling waits until the result of every earlier plan is applied, because its mask depends on
            them (grammars). Its forward pass does not wait.
    """

    slot: Slot
    request_id: RequestId
    start: int
    tokens: int
    sample: bool
    drafts: int = 0
    gated: bool = False


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy a whole block, all layers of its group.

    Attributes:
        group: whose block.
        source: to read.
        target: to overwrite.
    """

    group: int
    source: BlockId
    target: BlockId


class EncodeItem(msgspec.Struct, frozen=True, array_like=True):
    """Run the encoder for one media item and keep its output under the identifier.

    Attributes:
        slot: of the request that brings the item.
        request_id: owner of the slot.
        item: index among the request's media.
        identifier: content of the item; the key of the output.
    """

    slot: Slot
    request_id: RequestId
    item: int
    identifier: str


class LoadJob(msgspec.Struct, frozen=True, array_like=True):
    """Bring KV from outside into blocks. Answered by a `JobDone` event, also when it fails.

    Attributes:
        job_id: never reused.
        request_id: for whom.
        start_tokens: the load begins at this position.
        end_tokens: and ends before this one.
        blocks: targets per group, in the order of their positions; the null block where a group needs nothing.
        hashes: prefix hashes of the range, one a hash unit; the keys of the store.
    """

    job_id: int
    request_id: RequestId
    start_tokens: int
    end_tokens: int
    blocks: list[list[BlockId]]
    hashes: list[bytes]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    The worker does the parts in this order: releases, starts, appends, copies, encoder work, decodes and rows together,
    saves. Loads begin after the step's copies, whose sources they may overwrite, and end whenever they end.

    Attributes:
        step: rises by one.
        releases: slots whose request finished, was aborted or preempted.
        starts: requests that take a slot.
        appends: growth of the block tables of running slots.
        rows: what to compute beside ``decodes``. Empty is legal (only releases).
        decodes: slots that compute their last known token and sample one more, and ask for nothing else (no
            log-probabilities, drafts or gates). Most work of most steps, so it has no struct of its own.
        copies: block copies before anything is computed, one after the other.
        saves: block copies after everything is computed (checkpoints of recurrent states).
        encodes: media items whose encoder runs before the rows.
        encoder_frees: identifiers whose encoder output is dropped before the encoder runs.
        loads: transfers to start; their targets are read by no row of this plan.
    """

    step: StepId
    releases: list[Slot]
    starts: list[SlotStart]
    appends: list[BlockAppend]
    rows: list[PlanRow]
    decodes: list[Slot] = []
    copies: list[BlockCopy] = []
    saves: list[BlockCopy] = []
    encodes: list[EncodeItem] = []
    encoder_frees: list[str] = []
    loads: list[LoadJob] = []

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.decodes) + sum(row.tokens for row in self.rows)

"""What the worker keeps of each slot between steps: tokens, lengths, block tables. Row = slot.

A step sends only what changed; sampled tokens are appended here and never come back from the scheduler. Must not import
torch and must not know sampling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.errors import InvariantError, invariant
from headrace.base.ids import BlockId, RequestId
from headrace.types.plans import BlockAppend, SlotStart

_FIRST_CAPACITY_TOKENS = 256
_FIRST_CAPACITY_BLOCKS = 64
_RECENT_TOKENS = 64


class BatchState:
    """Per-slot arrays.

    Args:
        slots: most requests at once.
        groups: block tables of a request.

    Attributes:
        lengths: [slots] known tokens: prompt and output.
        prompt_lengths: [slots] prompt tokens.
        last_tokens: [slots] the last known token.
        block_tables: per group [slots, capacity], block ids from position 0; null behind a table's end.
        table_blocks: [slots, groups] length of each table.
        request_ids: who holds the slot, None if it is free.
        failures: why the slot's request cannot be served, None for a healthy one.
        failed: [slots] True where ``failures`` has a reason.
    """

    def __init__(self, slots: int, groups: int = 1) -> None:
        self.lengths = np.zeros(slots, np.int64)
        self.prompt_lengths = np.zeros(slots, np.int64)
        self.last_tokens = np.zeros(slots, np.int64)
        self.block_tables = [np.zeros((slots, _FIRST_CAPACITY_BLOCKS), np.int64) for _ in range(groups)]
        self.table_blocks = np.zeros((slots, groups), np.int64)
        self.request_ids: list[RequestId | None] = [None] * slots
        self.failures: list[str | None] = [None] * slots
        self.failed = np.zeros(slots, np.bool_)
        self._tokens: list[npt.NDArray[np.int64] | None] = [None] * slots
        # Sampled tokens that are not in `_tokens` yet: a step appends to all its slots at once, and a slot's tokens are
        # moved into its own array only when there are many or somebody looks.
        self._recent = np.zeros((slots, _RECENT_TOKENS), np.int64)
        self._recent_tokens = np.zeros(slots, np.int64)

    def start(self, start: SlotStart) -> None:
        """Give a free slot to a request.

        Raises:
            InvariantError: the slot is taken, or there is no token.
        """
        slot = start.slot
        holder = self.request_ids[slot]
        invariant(holder is None, f"slot {slot} given to {start.request_id} is still held by {holder}")
        known = len(start.token_ids)
        invariant(known > 0, f"request {start.request_id} starts without a token")
        tokens = np.zeros(max(_FIRST_CAPACITY_TOKENS, known + known // 2), np.int64)
        tokens[:known] = start.token_ids
        self._tokens[slot] = tokens
        self.request_ids[slot] = start.request_id
        self.lengths[slot] = known
        self.prompt_lengths[slot] = start.prompt_tokens
        self.last_tokens[slot] = tokens[known - 1]
        self.table_blocks[slot] = 0
        for table in self.block_tables:
            table[slot] = 0
        self._extend(slot, start.blocks)
        self.failures[slot] = None
        self.failed[slot] = False
        self._recent_tokens[slot] = 0

    def release(self, slot: int) -> None:
        """Free a slot.

        Raises:
            InvariantError: nobody holds it.
        """
        invariant(self.request_ids[slot] is not None, f"slot {slot} is released but nobody holds it")
        self.request_ids[slot] = None
        self._tokens[slot] = None
        self.table_blocks[slot] = 0
        self.failures[slot] = None
        self.failed[slot] = False
        self.lengths[slot] = self.prompt_lengths[slot] = self.last_tokens[slot] = 0

    def append_blocks(self, append: BlockAppend) -> None:
        """Lengthen a running slot's block tables.

        Raises:
            InvariantError: nobody holds the slot, or the group counts differ.
        """
        invariant(self.request_ids[append.slot] is not None, f"blocks for slot {append.slot}, which nobody holds")
        self._extend(append.slot, append.blocks)

    def append_tokens(self, slots: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Append one sampled token to each slot.

        Args:
            slots: different ones.
            token_ids: aligned with them.
        """
        for slot in slots[self._recent_tokens[slots] == _RECENT_TOKENS].tolist():
            self.tokens(slot)
        places = self._recent_tokens[slots]
        self._recent[slots, places] = token_ids
        self._recent_tokens[slots] = places + 1
        self.last_tokens[slots] = token_ids
        self.lengths[slots] += 1

    def tokens(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the token buffer of a slot; entries from its length on are undefined.

        Raises:
            InvariantError: nobody holds the slot.
        """
        tokens = self._tokens[slot]
        if tokens is None:
            raise InvariantError(f"slot {slot} has no tokens: nobody holds it")
        recent = int(self._recent_tokens[slot])
        if recent:
            length = int(self.lengths[slot])
            if length > tokens.size:
                grown = np.zeros(2 * length, np.int64)
                grown[: length - recent] = tokens[: length - recent]
                self._tokens[slot] = tokens = grown
            tokens[length - recent : length] = self._recent[slot, :recent]
            self._recent_tokens[slot] = 0
        return tokens

    def output_ids(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the output tokens of a slot, a view."""
        return self.tokens(slot)[self.prompt_lengths[slot] : self.lengths[slot]]

    def fail(self, slot: int, why: str, vocab_tokens: int) -> None:
        """Mark a request as failed. Its tokens outside the vocabulary become 0, so that a step can still run it."""
        self.failures[slot] = why
        self.failed[slot] = True
        tokens = self.tokens(slot)
        tokens[(tokens < 0) | (tokens >= vocab_tokens)] = 0
        self.last_tokens[slot] = tokens[self.lengths[slot] - 1]

    def _extend(self, slot: int, blocks: list[list[BlockId]]) -> None:
        groups = len(self.block_tables)
        invariant(len(blocks) == groups, f"slot {slot}: {groups} block tables, blocks for {len(blocks)}")
        for group, added in enumerate(blocks):
            if not added:
                continue
            table, held = self.block_tables[group], int(self.table_blocks[slot, group])
            end = held + len(added)
            if end > table.shape[1]:
                grown = np.zeros((table.shape[0], max(end, 2 * table.shape[1])), np.int64)
                grown[:, : table.shape[1]] = table
                self.block_tables[group] = table = grown
            table[slot, held:end] = added
            self.table_blocks[slot, group] = end

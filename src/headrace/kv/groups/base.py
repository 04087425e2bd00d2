"""The contract of a group: six methods, the same for every kind of cache spec, and what the kinds have in common.

Tables are lists of block ids from position 0; a group may put the null block where it keeps nothing. A table only ever
grows at its end, because the worker holds a copy and is told of additions alone. Must not look at other groups.

A group says what a resume at n tokens reads, and so what a hit of n tokens must have, what can be freed once n tokens
are computed, and what is worth storing. All three follow from one number: `CacheGroup.skippable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.base.errors import invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout

NEVER_TOKENS = 1 << 62
"""A number of tokens that no sequence reaches."""


@dataclass(frozen=True, slots=True)
class GroupHit:
    """What one group has for a beginning of a sequence. Nothing is pinned: use it before anything is allocated.

    Attributes:
        tokens: length of the beginning; a multiple of the hash unit.
        table: blocks to share as they are, from position 0; null where the group needs nothing.
        tail: block whose first part is to be copied into a fresh one, because the hit ends inside it; of a recurrent
            group the checkpoint, to be copied into the working state. None if nothing is to be copied.
    """

    tokens: int
    table: list[BlockId]
    tail: BlockId | None = None


NO_GROUP_HIT = GroupHit(0, [])


class CacheGroup(Protocol):
    """Layers with one cache spec."""

    @property
    def pool(self) -> BlockPool:
        """The group's blocks."""
        ...

    @property
    def layout(self) -> GroupLayout:
        """Spec, layers and block size."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens in one block; 0 for a state."""
        ...

    @property
    def keeps_all(self) -> bool:
        """True if `free_behind` never frees anything, so that nobody needs to ask."""
        ...

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Find the longest cached beginning.

        Args:
            hashes: prefix hashes of the sequence, one a unit, at least up to ``max_tokens``.
            max_tokens: no hit may be longer; a multiple of the hash unit.
            longer: this group's hit at a larger ``max_tokens``, nothing has changed since. A group that keeps all
                tokens cuts it; the others look again, since a shorter hit may need other blocks.
        """
        ...

    def skippable(self, tokens: int) -> int:
        """Return the first position that may still be read once ``tokens`` tokens are computed."""
        ...

    def blocks_needed(self, table_blocks: int, tokens: int, encoder_tokens: int = 0) -> int:
        """Return how many blocks a table of ``table_blocks`` lacks, so that all up to ``tokens`` can be written.

        Args:
            table_blocks: places in the table, null ones included.
            tokens: of the decoder.
            encoder_tokens: of the encoder.
        """
        ...

    def allocate(self, table: list[BlockId], count_blocks: int) -> list[BlockId]:
        """Grow a table and return its new end.

        Mutates: ``table``, the pool.
        Requires: ``count_blocks`` blocks are free.
        """
        ...

    def free_behind(self, table: list[BlockId], first_block: int, computed_tokens: int) -> int:
        """Free what no later token reads, once ``computed_tokens`` are computed **and applied**.

        Args:
            table: of a sequence.
            first_block: all places before this one are null already.
            computed_tokens: of the sequence.

        Returns:
            The new ``first_block``; places that were freed hold the null block.

        Mutates: ``table``, the pool.
        """
        ...

    def free_at(self, first_block: int) -> int:
        """Return the number of computed tokens at which `free_behind` frees that block, `NEVER_TOKENS` if never."""
        ...

    def reachable(self, block_index: int, end_tokens: int, align_tokens: int) -> bool:
        """Return whether a later hit can need a block; if not, it is not worth caching or storing.

        Args:
            block_index: place in the table.
            end_tokens: where the sequence, as far as it will be cached, ends. A hit may end there.
            align_tokens: hits end at its multiples too.
        """
        ...

    def common_prefix(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Return how many leading blocks are the same in all tables."""
        ...


class TokenGroup:
    """A group whose blocks hold tokens by position: all that its kinds have in common.

    As it stands it keeps every token; a kind replaces what differs and adds `longest_hit`.
    """

    keeps_all = True

    def __init__(self, layout: GroupLayout, pool: BlockPool, *, hash_tokens: int) -> None:
        """Make the manager of a group.

        Args:
            layout: of the group.
            pool: its blocks.
            hash_tokens: tokens under one prefix hash; divides the block.
        """
        invariant(
            layout.block_tokens > 0 and layout.block_tokens % hash_tokens == 0,
            f"group {layout.group}: {layout.block_tokens} tokens a block, {hash_tokens} a hash",
        )
        self.layout = layout
        self.pool = pool
        self.block_tokens = layout.block_tokens
        self.hash_tokens = hash_tokens

    def skippable(self, tokens: int) -> int:
        """Return 0: every later token reads all earlier ones."""
        return 0

    def blocks_needed(self, table_blocks: int, tokens: int, encoder_tokens: int = 0) -> int:
        """Return the missing blocks, never below 0."""
        return max(0, -(-tokens // self.block_tokens) - table_blocks)

    def allocate(self, table: list[BlockId], count_blocks: int) -> list[BlockId]:
        """Append new blocks to the table."""
        blocks = self.pool.allocate(count_blocks, table)
        table.extend(blocks)
        return blocks

    def free_behind(self, table: list[BlockId], first_block: int, computed_tokens: int) -> int:
        """Free the blocks that lie wholly before `skippable`."""
        end_block = min(self.skippable(computed_tokens) // self.block_tokens, len(table))
        if end_block <= first_block:
            return first_block
        self.pool.free(table[first_block:end_block])
        table[first_block:end_block] = [NULL_BLOCK] * (end_block - first_block)
        return end_block

    def free_at(self, first_block: int) -> int:
        """Return that no block is ever freed."""
        return NEVER_TOKENS

    def reachable(self, block_index: int, end_tokens: int, align_tokens: int) -> bool:
        """Return whether the sequence reaches the block: a hit may end anywhere behind it."""
        return block_index * self.block_tokens < end_tokens

    def common_prefix(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Compare the tables place by place."""
        return equal_places(tables)

    def find(self, hashes: Sequence[bytes], tokens: int) -> BlockId | None:
        """Return a block whose content is right up to ``tokens``, a boundary of hash units, or None."""
        return self.pool.find(hashes[tokens // self.hash_tokens - 1])


def equal_places(tables: Sequence[Sequence[BlockId]]) -> int:
    """Return the number of leading places at which all tables agree."""
    places = 0
    for blocks in zip(*tables, strict=False):
        if any(block != blocks[0] for block in blocks):
            break
        places += 1
    return places

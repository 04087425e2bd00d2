"""Recurrent states (Mamba, GDN, KDA): one working state a sequence, changed in place; checkpoints are what can be hit.

A block is one whole state. The table is the working state alone; it is never shared and never published. Must not
look up a state by its place: only the checkpoint made at exactly that boundary is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.ids import BlockId
from headrace.kv.groups.base import NEVER_TOKENS, NO_GROUP_HIT, GroupHit
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout


class RecurrentGroup:
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    keeps_all = True
    block_tokens = 0

    def __init__(self, layout: GroupLayout, pool: BlockPool, *, hash_tokens: int) -> None:
        """Make the manager.

        Args:
            layout: of the group.
            pool: its states.
            hash_tokens: tokens under one prefix hash; checkpoints lie at its multiples.
        """
        self.layout = layout
        self.pool = pool
        self._hash_tokens = hash_tokens

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Walk right to left over the boundaries of hash units; the first checkpoint wins."""
        find = self.pool.find
        for unit in range(max_tokens // self._hash_tokens, 0, -1):
            checkpoint = find(hashes[unit - 1])
            if checkpoint is not None:
                return GroupHit(unit * self._hash_tokens, [], checkpoint)
        return NO_GROUP_HIT

    def skippable(self, tokens: int) -> int:
        """Return 0: the state is one block, and it is read by every later token."""
        return 0

    def blocks_needed(self, table_blocks: int, tokens: int, encoder_tokens: int = 0) -> int:
        """Return 1 for a sequence without a working state."""
        return 0 if table_blocks else 1

    def allocate(self, table: list[BlockId], count_blocks: int) -> list[BlockId]:
        """Append the working state."""
        blocks = self.pool.allocate(count_blocks, table)
        table.extend(blocks)
        return blocks

    def free_behind(self, table: list[BlockId], first_block: int, computed_tokens: int) -> int:
        """Free nothing."""
        return first_block

    def free_at(self, first_block: int) -> int:
        """Return that nothing is ever freed."""
        return NEVER_TOKENS

    def reachable(self, block_index: int, end_tokens: int, align_tokens: int) -> bool:
        """Return False: the working state is behind every boundary as soon as the next token is computed."""
        return False

    def common_prefix(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Return 0: working states are never shared."""
        return 0

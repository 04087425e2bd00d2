"""Cross attention: keys and values of the encoder's tokens, written once for one sequence, read by all its tokens.

They depend on the encoder's input alone, not on the decoder's tokens, so no prefix hash stands for them. Must not be
published or hit, and never limits the hit of other groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.base.ids import BlockId
from headrace.kv.groups.base import NEVER_TOKENS, GroupHit
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout


class CrossGroup:
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    keeps_all = True

    def __init__(self, layout: GroupLayout, pool: BlockPool) -> None:
        """Make the manager.

        Args:
            layout: of the group; a block holds ``block_tokens`` tokens of the encoder.
            pool: its blocks.
        """
        invariant(layout.block_tokens > 0, f"group {layout.group}: {layout.block_tokens} tokens a block")
        self.layout = layout
        self.pool = pool
        self.block_tokens = layout.block_tokens

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Return that any length will do: nothing of the decoder lies here."""
        return GroupHit(max_tokens, [])

    def skippable(self, tokens: int) -> int:
        """Return 0: every decoder token reads all of the encoder's."""
        return 0

    def blocks_needed(self, table_blocks: int, tokens: int, encoder_tokens: int = 0) -> int:
        """Return the blocks of the whole encoder output that the table lacks; ``tokens`` does not matter."""
        return max(0, -(-encoder_tokens // self.block_tokens) - table_blocks)

    def allocate(self, table: list[BlockId], count_blocks: int) -> list[BlockId]:
        """Append new blocks to the table."""
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
        """Return False: it is never hit."""
        return False

    def common_prefix(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Return 0: the tables of two sequences share no block."""
        return 0

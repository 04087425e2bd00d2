"""Full attention: every token is kept and read, so a table has a block for every position.

Must not free anything before the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.base.ids import BlockId, GroupId
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout


class FullGroup:
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    keeps_all = True

    def __init__(self, layout: GroupLayout, *, hash_tokens: int, record_events: bool = False) -> None:
        """Make the manager and its pool.

        Args:
            layout: of the group.
            hash_tokens: tokens under one prefix hash; divides the block.
            record_events: record cache events.
        """
        invariant(
            layout.block_tokens % hash_tokens == 0,
            f"group {layout.group}: {layout.block_tokens} tokens a block, {hash_tokens} a hash",
        )
        self.block_tokens = layout.block_tokens
        self.pool = BlockPool(GroupId(layout.group), layout.num_blocks, record_events=record_events)
        self._hashes_per_block = layout.block_tokens // hash_tokens

    def block_hash(self, hashes: Sequence[bytes], index: int) -> bytes:
        """Return the last fine hash of the block: it stands for all tokens up to the block's end."""
        return hashes[(index + 1) * self._hashes_per_block - 1]

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> list[BlockId]:
        """Walk left to right until the first miss."""
        stride = self._hashes_per_block
        limit_blocks = min(max_tokens // self.block_tokens, len(hashes) // stride)
        find = self.pool.find
        table: list[BlockId] = []
        for index in range(stride - 1, limit_blocks * stride, stride):
            block = find(hashes[index])
            if block is None:
                break
            table.append(block)
        return table

    def blocks_needed(self, table_blocks: int, tokens: int) -> int:
        """Return the missing blocks, never below 0."""
        return max(0, -(-tokens // self.block_tokens) - table_blocks)

    def allocate(self, table: list[BlockId], count_blocks: int) -> list[BlockId]:
        """Append new blocks to the table."""
        blocks = self.pool.allocate(count_blocks)
        table.extend(blocks)
        return blocks

    def free_behind(self, table: list[BlockId], computed_tokens: int) -> int:
        """Free nothing: every later token reads all earlier ones."""
        return 0

    def reachable(self, block_index: int, end_tokens: int) -> bool:
        """Return True: a hit may end at any block."""
        return True

    def common_prefix(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Compare the tables place by place."""
        shared_blocks = 0
        for blocks in zip(*tables, strict=False):
            if any(block != blocks[0] for block in blocks):
                break
            shared_blocks += 1
        return shared_blocks

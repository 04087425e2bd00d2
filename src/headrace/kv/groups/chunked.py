"""Chunked local attention: a token reads the tokens of its own chunk, so a chunk is freed when the next one begins.

A resume at n reads [floor(n / c) * c, n): nothing at all if n is a chunk boundary. Must not trim a hit: one that ends
in an earlier chunk needs the blocks of that chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.groups.base import NO_GROUP_HIT, GroupHit, TokenGroup
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import ChunkedLocalSpec, GroupLayout


class ChunkedGroup(TokenGroup):
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    keeps_all = False

    def __init__(self, layout: GroupLayout, spec: ChunkedLocalSpec, pool: BlockPool, *, hash_tokens: int) -> None:
        """Make the manager; see `TokenGroup`. A chunk need not begin at a block edge."""
        super().__init__(layout, pool, hash_tokens=hash_tokens)
        invariant(spec.chunk_tokens >= 1, f"group {layout.group}: chunks of {spec.chunk_tokens} tokens")
        self._chunk_tokens = spec.chunk_tokens

    def skippable(self, tokens: int) -> int:
        """Return the start of the chunk in which position ``tokens`` lies."""
        return tokens // self._chunk_tokens * self._chunk_tokens

    def free_at(self, first_block: int) -> int:
        """Return the first chunk boundary at or behind the block's end."""
        end = (first_block + 1) * self.block_tokens
        return -(-end // self._chunk_tokens) * self._chunk_tokens

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Walk left to right from the start of the last chunk; if that has nothing, a chunk boundary needs nothing."""
        tokens = max_tokens
        while tokens > 0:
            hit = self._hit_in_chunk(hashes, tokens)
            if hit is not None:
                return hit
            # The boundary itself lies between two hash units: go on in the chunk before it.
            start = self.skippable(tokens)
            tokens = start - start % self.hash_tokens
        return NO_GROUP_HIT

    def _hit_in_chunk(self, hashes: Sequence[bytes], max_tokens: int) -> GroupHit | None:
        start, size = self.skippable(max_tokens), self.block_tokens
        table: list[BlockId] = [NULL_BLOCK] * (start // size)
        while (len(table) + 1) * size <= max_tokens and start < max_tokens:
            block = self.find(hashes, (len(table) + 1) * size)
            if block is None:
                break
            table.append(block)
        reached = len(table) * size
        most_tokens = min(max_tokens, reached + size - self.hash_tokens)
        for boundary in range(most_tokens, max(start, reached), -self.hash_tokens):
            tail = self.find(hashes, boundary)
            if tail is not None:
                return GroupHit(boundary, table, tail)
        if reached >= start:
            return GroupHit(reached, table)
        return GroupHit(start, table) if start % self.hash_tokens == 0 else None

    def reachable(self, block_index: int, end_tokens: int, align_tokens: int) -> bool:
        """Return whether a resume at an allowed end, inside a chunk that overlaps the block, reads it."""
        start = block_index * self.block_tokens
        last_chunk_end = self.free_at(block_index)
        if start < end_tokens < last_chunk_end and end_tokens % self._chunk_tokens:
            return True
        first_end = (start // align_tokens + 1) * align_tokens
        ends = range(first_end, min(end_tokens + 1, last_chunk_end), align_tokens)
        return any(end % self._chunk_tokens for end in ends)

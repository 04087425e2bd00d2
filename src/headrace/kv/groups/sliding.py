"""Sliding windows: position p reads p - w + 1 to p, so what lies before the window is freed, and a hit needs no more.

A resume at n reads [n - w + 1, n) and then what it writes itself. Must not trim a hit: a shorter one needs earlier
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.groups.base import NO_GROUP_HIT, GroupHit, TokenGroup
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout, SlidingWindowSpec


class SlidingGroup(TokenGroup):
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    keeps_all = False

    def __init__(self, layout: GroupLayout, spec: SlidingWindowSpec, pool: BlockPool, *, hash_tokens: int) -> None:
        """Make the manager; see `TokenGroup`."""
        super().__init__(layout, pool, hash_tokens=hash_tokens)
        invariant(spec.window_tokens >= 1, f"group {layout.group}: a window of {spec.window_tokens} tokens")
        self._window_tokens = spec.window_tokens

    def skippable(self, tokens: int) -> int:
        """Return the first position inside the window of position ``tokens``."""
        return max(0, tokens - self._window_tokens + 1)

    def free_at(self, first_block: int) -> int:
        """Return where the window leaves the block."""
        return (first_block + 1) * self.block_tokens + self._window_tokens - 1

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Walk right to left for a run of blocks that covers a window; a shorter run counts if it touches 0.

        Every block is looked at once: if block j is missing, so is the window of every end behind it that was tried.
        """
        tokens = max_tokens
        while tokens > 0:
            first = self.skippable(tokens) // self.block_tokens
            full, rest = divmod(tokens, self.block_tokens)
            if self._window_tokens == 1:
                return GroupHit(tokens, [NULL_BLOCK] * full)
            tail = self.find(hashes, tokens) if rest else None
            if rest and tail is None:
                tokens -= self.hash_tokens
                continue
            run: list[BlockId] = []
            for index in range(full - 1, first - 1, -1):
                block = self.find(hashes, (index + 1) * self.block_tokens)
                if block is None:
                    tokens = (index + 1) * self.block_tokens - self.hash_tokens
                    break
                run.append(block)
            else:
                return GroupHit(tokens, [NULL_BLOCK] * min(first, full) + run[::-1], tail)
        return NO_GROUP_HIT

    def reachable(self, block_index: int, end_tokens: int, align_tokens: int) -> bool:
        """Return whether some window before an allowed end overlaps the block."""
        start = block_index * self.block_tokens
        last_end = start + self.block_tokens + self._window_tokens - 2
        if self._window_tokens == 1 or start >= end_tokens:
            return False
        next_end = (start // align_tokens + 1) * align_tokens
        return next_end <= min(end_tokens, last_end) or end_tokens <= last_end

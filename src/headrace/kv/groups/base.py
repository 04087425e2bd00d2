"""The contract of a group: six methods, the same for every kind of cache spec.

Tables are lists of block ids from position 0; a group may put the null block where it keeps nothing. A table only ever
grows at its end, because the worker holds a copy and is told of additions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.base.ids import BlockId
from headrace.kv.pool import BlockPool


class CacheGroup(Protocol):
    """Layers with one cache spec."""

    @property
    def pool(self) -> BlockPool:
        """The group's blocks."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""
        ...

    @property
    def keeps_all(self) -> bool:
        """True if `free_behind` never frees anything, so that nobody needs to ask."""
        ...

    def block_hash(self, hashes: Sequence[bytes], index: int) -> bytes:
        """Return the hash of the prefix that ends with block ``index``."""
        ...

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> list[BlockId]:
        """Find the longest cached beginning.

        Args:
            hashes: prefix hashes of the sequence.
            max_tokens: no hit may be longer.

        Returns:
            A table that covers the hit in whole blocks. Not touched: pin it before anything is allocated.
        """
        ...

    def blocks_needed(self, table_blocks: int, tokens: int) -> int:
        """Return how many blocks a table of ``table_blocks`` lacks to hold ``tokens`` tokens."""
        ...

    def allocate(self, table: list[BlockId], count_blocks: int) -> list[BlockId]:
        """Grow a table and return its new end.

        Mutates: ``table``, the pool.
        Requires: ``count_blocks`` blocks are free.
        """
        ...

    def free_behind(self, table: list[BlockId], computed_tokens: int) -> int:
        """Free what no later token reads, once ``computed_tokens`` are computed **and applied**.

        Returns:
            Number of blocks freed; their places in the table hold the null block.

        Mutates: ``table``, the pool.
        """
        ...

    def reachable(self, block_index: int, end_tokens: int) -> bool:
        """Return whether a block can be part of a later hit; if not, it is not worth caching.

        Args:
            block_index: place in the table.
            end_tokens: length of the sequence so far.
        """
        ...

    def common_prefix(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Return how many leading blocks are the same in all tables."""
        ...

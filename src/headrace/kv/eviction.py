"""Which idle block is evicted first: least recently used, or the least worth by reuse and cost to recompute.

A policy orders the idle blocks of one pool that cache something. Its ranks are comparable between the pools of one
memory, because they share one `Inflation`. Must not know extents, hashes or references; the pool tells it all.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from headrace.base.errors import ConfigError
from headrace.base.ids import BlockId

POLICIES = ("lru", "cost")


class Inflation:
    """The clock that the policies of one memory share: it only rises.

    Attributes:
        value: for "lru" the number of the last release; for "cost" the highest rank evicted so far.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class EvictionPolicy(Protocol):
    """Orders the idle blocks of one pool."""

    counts_uses: bool
    """True if the pool must report hits (`used`) and lost content (`dropped`)."""

    def __len__(self) -> int:
        """Idle blocks."""
        ...

    def __contains__(self, block: object) -> bool:
        """Return whether a block is idle."""
        ...

    def __iter__(self) -> Iterator[BlockId]:
        """Yield the idle blocks in the order of their eviction."""
        ...

    def add(self, blocks: Iterable[BlockId]) -> float:
        """Take blocks that became idle, the first to be evicted first. Returns their highest rank."""
        ...

    def remove(self, blocks: Iterable[BlockId]) -> None:
        """Drop idle blocks: somebody uses them again, or they cache nothing any more."""
        ...

    def take(self, count_blocks: int) -> list[BlockId]:
        """Evict the next blocks and return them. Requires so many idle blocks."""
        ...

    def evict(self, block: BlockId) -> None:
        """Evict one idle block, which is among the next."""
        ...

    def first(self, count_blocks: int) -> list[BlockId]:
        """Return the next blocks to evict, at most ``count_blocks``, without removing them."""
        ...

    def rank(self, block: BlockId) -> float:
        """Return the rank of an idle block: the lowest is evicted first, over all pools of a memory."""
        ...

    def used(self, blocks: Iterable[BlockId]) -> None:
        """Note a hit on each block."""
        ...

    def dropped(self, blocks: Iterable[BlockId]) -> None:
        """Forget what was noted of blocks whose content is gone."""
        ...


class LeastRecentlyUsed:
    """Evicts what has been idle for the longest time; the default."""

    counts_uses = False

    def __init__(self, inflation: Inflation) -> None:
        """Make an empty order.

        Args:
            inflation: shared by the pools of a memory.
        """
        self._inflation = inflation
        # A doubly linked list with O(1) removal from the middle; the value is the rank.
        self._ranks: OrderedDict[BlockId, float] = OrderedDict()

    def __len__(self) -> int:
        """See `EvictionPolicy`."""
        return len(self._ranks)

    def __contains__(self, block: object) -> bool:
        """See `EvictionPolicy`."""
        return block in self._ranks

    def __iter__(self) -> Iterator[BlockId]:
        """See `EvictionPolicy`."""
        return iter(self._ranks)

    def add(self, blocks: Iterable[BlockId]) -> float:
        """See `EvictionPolicy`. All blocks of one release have one rank."""
        rank = self._inflation.value = self._inflation.value + 1
        ranks = self._ranks
        for block in blocks:
            ranks[block] = rank
        return rank

    def remove(self, blocks: Iterable[BlockId]) -> None:
        """See `EvictionPolicy`."""
        ranks = self._ranks
        for block in blocks:
            del ranks[block]

    def take(self, count_blocks: int) -> list[BlockId]:
        """See `EvictionPolicy`."""
        popitem = self._ranks.popitem
        if count_blocks == 1:
            return [popitem(last=False)[0]]
        return [popitem(last=False)[0] for _ in range(count_blocks)]

    def evict(self, block: BlockId) -> None:
        """See `EvictionPolicy`."""
        del self._ranks[block]

    def first(self, count_blocks: int) -> list[BlockId]:
        """See `EvictionPolicy`."""
        return list(itertools.islice(self._ranks, count_blocks))

    def rank(self, block: BlockId) -> float:
        """See `EvictionPolicy`."""
        return self._ranks[block]

    def used(self, blocks: Iterable[BlockId]) -> None:
        """See `EvictionPolicy`: time alone counts."""

    def dropped(self, blocks: Iterable[BlockId]) -> None:
        """See `EvictionPolicy`: nothing is noted."""


class CostAware:
    """Evicts the block with the lowest ``clock + uses * cost / size``.

    GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
    Caching Policy", HP Labs HPL-98-69, 1998, after P. Cao and S. Irani, "Cost-Aware WWW Proxy Caching Algorithms",
    USITS 1997). The clock is the rank of the last victim: what was useful long ago is overtaken in the end. The cost of
    a block is the tokens that must be computed again without it, its size is its bytes.
    """

    counts_uses = True

    def __init__(self, inflation: Inflation, worth: float) -> None:
        """Make an empty order.

        Args:
            inflation: shared by the pools of a memory.
            worth: tokens recomputed a byte; above 0.
        """
        self._inflation = inflation
        self._worth = worth
        self._uses: dict[BlockId, int] = {}
        # Entries of blocks that are no longer idle stay in the heap until they surface; `_live` says which count.
        self._heap: list[tuple[float, int, BlockId]] = []
        self._live: dict[BlockId, tuple[float, int, BlockId]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        """See `EvictionPolicy`."""
        return len(self._live)

    def __contains__(self, block: object) -> bool:
        """See `EvictionPolicy`."""
        return block in self._live

    def __iter__(self) -> Iterator[BlockId]:
        """See `EvictionPolicy`."""
        return iter([block for _, _, block in sorted(self._live.values())])

    def add(self, blocks: Iterable[BlockId]) -> float:
        """See `EvictionPolicy`."""
        clock, worth, uses = self._inflation.value, self._worth, self._uses
        highest = clock
        for block in blocks:
            rank = clock + (1 + uses.get(block, 0)) * worth
            self._live[block] = entry = (rank, next(self._order), block)
            heapq.heappush(self._heap, entry)
            highest = max(highest, rank)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = sorted(self._live.values())
        return highest

    def remove(self, blocks: Iterable[BlockId]) -> None:
        """See `EvictionPolicy`."""
        for block in blocks:
            del self._live[block]

    def take(self, count_blocks: int) -> list[BlockId]:
        """See `EvictionPolicy`."""
        taken: list[BlockId] = []
        while len(taken) < count_blocks:
            entry = heapq.heappop(self._heap)
            if self._live.get(entry[2]) is entry:
                del self._live[entry[2]]
                self._inflation.value = max(self._inflation.value, entry[0])
                taken.append(entry[2])
        return taken

    def evict(self, block: BlockId) -> None:
        """See `EvictionPolicy`."""
        self._inflation.value = max(self._inflation.value, self._live.pop(block)[0])

    def first(self, count_blocks: int) -> list[BlockId]:
        """See `EvictionPolicy`."""
        found: list[tuple[float, int, BlockId]] = []
        while self._heap and len(found) < count_blocks:
            entry = heapq.heappop(self._heap)
            if self._live.get(entry[2]) is entry:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [block for _, _, block in found]

    def rank(self, block: BlockId) -> float:
        """See `EvictionPolicy`."""
        return self._live[block][0]

    def used(self, blocks: Iterable[BlockId]) -> None:
        """See `EvictionPolicy`."""
        uses = self._uses
        for block in blocks:
            uses[block] = uses.get(block, 0) + 1

    def dropped(self, blocks: Iterable[BlockId]) -> None:
        """See `EvictionPolicy`."""
        for block in blocks:
            self._uses.pop(block, None)


def make_policy(name: str, inflation: Inflation, worth: float) -> EvictionPolicy:
    """Return an empty policy.

    Args:
        name: one of `POLICIES`.
        inflation: shared by the pools of a memory.
        worth: tokens that must be computed again without a block, divided by the bytes of the block.

    Raises:
        ConfigError: unknown name.
    """
    if name == "lru":
        return LeastRecentlyUsed(inflation)
    if name == "cost":
        return CostAware(inflation, worth)
    raise ConfigError(f"--eviction {name}: choose one of {', '.join(POLICIES)}", param="eviction")

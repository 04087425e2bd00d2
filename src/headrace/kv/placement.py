"""Where a pool's free blocks lie and which are handed out next, so that whole extents come back.

`SingleRow` serves a memory with one group: all blocks for good, no extents to give back. `ExtentRows` serves a memory
that several groups share: a sequence goes on in the extent of its last block, else in the fullest that has room, so
that the emptiest come back; a wholly plain extent is begun last. Must not know hashes, references or other groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.base.ids import NULL_BLOCK, BlockId

_LEVELS = 32
"""Extents are sorted by fullness into so many classes."""


class Placement(Protocol):
    """Blocks of one pool that are free and cache nothing ("plain"), and the state of its extents."""

    @property
    def shares_memory(self) -> bool:
        """True if extents come and go, so that it matters which block is evicted."""
        ...

    @property
    def plain_blocks(self) -> int:
        """Plain blocks now."""
        ...

    @property
    def own_blocks(self) -> int:
        """Blocks of the pool's extents now, in whatever state."""
        ...

    def block_ids(self) -> list[BlockId]:
        """Return the ids of all blocks of the pool's extents now, ascending."""
        ...

    def plain_list(self) -> list[BlockId]:
        """Return the plain blocks; of one extent, the next to be handed out first."""
        ...

    def take(self, count_blocks: int, table: Sequence[BlockId]) -> list[BlockId]:
        """Hand out plain blocks for the end of a table. Requires so many."""
        ...

    def freed(self, plain: list[BlockId], idle: list[BlockId], rank: float) -> None:
        """Note blocks that lost their last owner: ``plain`` cache nothing, ``idle`` do, at an eviction rank."""
        ...

    def touched(self, blocks: Iterable[BlockId]) -> None:
        """Note idle blocks that have an owner again."""
        ...

    def emptied(self, blocks: list[BlockId]) -> None:
        """Note idle blocks that cache nothing any more: they are plain."""
        ...

    def victim(self, candidates: Sequence[BlockId]) -> BlockId:
        """Choose among idle blocks of about equal worth the one whose extent is nearest to coming back."""
        ...


class SingleRow:
    """All blocks of a memory that one group has alone. See `Placement`."""

    shares_memory = False

    def __init__(self, blocks: Iterable[BlockId]) -> None:
        """Make the row.

        Args:
            blocks: all of them, ascending.
        """
        self._blocks = list(blocks)
        self._plain = self._blocks[::-1]
        self.own_blocks = len(self._plain)

    @property
    def plain_blocks(self) -> int:
        """See `Placement`."""
        return len(self._plain)

    def block_ids(self) -> list[BlockId]:
        """See `Placement`."""
        return list(self._blocks)

    def plain_list(self) -> list[BlockId]:
        """See `Placement`."""
        return self._plain[::-1]

    def take(self, count_blocks: int, table: Sequence[BlockId]) -> list[BlockId]:
        """See `Placement`: the last freed first, else ascending."""
        plain = self._plain
        if count_blocks == 1:
            return [plain.pop()]
        if not count_blocks:
            return []
        taken = plain[-count_blocks:]
        del plain[-count_blocks:]
        taken.reverse()
        return taken

    def freed(self, plain: list[BlockId], idle: list[BlockId], rank: float) -> None:
        """See `Placement`."""
        self._plain += plain

    def touched(self, blocks: Iterable[BlockId]) -> None:
        """See `Placement`: nothing depends on it."""

    def emptied(self, blocks: list[BlockId]) -> None:
        """See `Placement`: the first of them is handed out first."""
        self._plain += reversed(blocks)

    def victim(self, candidates: Sequence[BlockId]) -> BlockId:
        """See `Placement`: the oldest."""
        return candidates[0]


class Extent:
    """What is in one extent that a pool has.

    Attributes:
        plain: its free blocks that cache nothing; the last is handed out first.
        live_blocks: blocks with an owner.
        newest_rank: highest eviction rank of the blocks that became idle in it.
        level: class of fullness under which it is filed, -1 if it is not.
    """

    __slots__ = ("level", "live_blocks", "newest_rank", "plain")

    def __init__(self, plain: list[BlockId]) -> None:
        self.plain = plain
        self.live_blocks = 0
        self.newest_rank = 0.0
        self.level = -1


class ExtentRows:
    """Blocks of the extents that a group has for now. See `Placement`."""

    shares_memory = True

    def __init__(self, *, first_granule: int, extent_granules: int, block_granules: int) -> None:
        """Make rows without an extent.

        Args:
            first_granule: where extent 0 begins.
            extent_granules: granules of an extent.
            block_granules: granules of a block of this group.
        """
        self._first, self._extent_granules, self._block_granules = first_granule, extent_granules, block_granules
        self.extent_blocks = extent_granules // block_granules
        self.extents: dict[int, Extent] = {}
        self.plain_blocks = 0
        self.returned: list[int] = []
        """Extents that have become empty since the owner of the memory last looked."""
        # Ordered dictionaries: the first key of a plain one is slow to find once many before it are deleted.
        self.idle_extents: OrderedDict[int, None] = OrderedDict()
        """Extents without an owned block that still cache something; the longest idle first."""
        self.empty_extents: OrderedDict[int, None] = OrderedDict()
        """Extents in which every block is plain: just lent, not used yet."""
        self._by_level: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(_LEVELS + 1)]

    @property
    def own_blocks(self) -> int:
        """See `Placement`."""
        return len(self.extents) * self.extent_blocks

    def block_ids(self) -> list[BlockId]:
        """See `Placement`."""
        return [BlockId(block) for index in sorted(self.extents) for block in self.blocks_of(index)]

    def plain_list(self) -> list[BlockId]:
        """See `Placement`."""
        return [block for extent in self.extents.values() for block in reversed(extent.plain)]

    def blocks_of(self, index: int) -> range:
        """Return the ids of an extent's blocks."""
        start = self._first + index * self._extent_granules
        return range(start, start + self.extent_blocks * self._block_granules, self._block_granules)

    def add_extent(self, index: int) -> None:
        """Take an extent on loan; all of its blocks are plain."""
        self.extents[index] = Extent([BlockId(block) for block in reversed(self.blocks_of(index))])
        self.empty_extents[index] = None
        self.plain_blocks += self.extent_blocks

    def drop_extent(self, index: int) -> None:
        """Give an extent back. Requires that all of its blocks are plain."""
        del self.extents[index]
        del self.empty_extents[index]
        self.plain_blocks -= self.extent_blocks

    def extent_of(self, block: BlockId) -> int:
        """Return the index of the extent in which a block lies."""
        return (block - self._first) // self._extent_granules

    def take(self, count_blocks: int, table: Sequence[BlockId]) -> list[BlockId]:
        """See `Placement`."""
        near = self.extent_of(table[-1]) if table and table[-1] != NULL_BLOCK else -1
        taken: list[BlockId] = []
        missing = count_blocks
        while missing:
            index = self._choose(near)
            extent = self.extents[index]
            part = extent.plain[-missing:]
            del extent.plain[-missing:]
            part.reverse()
            taken += part
            missing -= len(part)
            if not extent.live_blocks:
                self.empty_extents.pop(index, None)
                self.idle_extents.pop(index, None)
            extent.live_blocks += len(part)
            self._file(index, extent)
            near = index
        self.plain_blocks -= count_blocks
        return taken

    def freed(self, plain: list[BlockId], idle: list[BlockId], rank: float) -> None:
        """See `Placement`."""
        changed: set[int] = set()
        first, size, extents = self._first, self._extent_granules, self.extents
        for block in plain:
            index = (block - first) // size
            extent = extents[index]
            extent.plain.append(block)
            extent.live_blocks -= 1
            changed.add(index)
        self.plain_blocks += len(plain)
        for block in idle:
            index = (block - first) // size
            extent = extents[index]
            extent.live_blocks -= 1
            if rank > extent.newest_rank:
                extent.newest_rank = rank
            changed.add(index)
        for index in changed:
            self._settle(index)

    def touched(self, blocks: Iterable[BlockId]) -> None:
        """See `Placement`."""
        for block in blocks:
            index = self.extent_of(block)
            extent = self.extents[index]
            extent.live_blocks += 1
            self.idle_extents.pop(index, None)
            self._file(index, extent)

    def emptied(self, blocks: list[BlockId]) -> None:
        """See `Placement`."""
        changed: dict[int, None] = {}
        for block in reversed(blocks):
            index = self.extent_of(block)
            self.extents[index].plain.append(block)
            changed[index] = None
        self.plain_blocks += len(blocks)
        for index in changed:
            self._settle(index)

    def victim(self, candidates: Sequence[BlockId]) -> BlockId:
        """See `Placement`: in the extent with the fewest owned blocks, the older first."""
        return min(candidates, key=lambda block: self.extents[self.extent_of(block)].live_blocks)

    def _choose(self, near: int) -> int:
        """Return the extent from which the next blocks come."""
        extent = self.extents.get(near)
        if extent is not None and extent.plain:
            return near
        for level in reversed(self._by_level):
            if level:
                return next(iter(level))
        return next(iter(self.empty_extents))

    def _settle(self, index: int) -> None:
        """File an extent again after blocks in it lost their owner or their content."""
        extent = self.extents[index]
        if not extent.live_blocks:
            if len(extent.plain) == self.extent_blocks:
                self.idle_extents.pop(index, None)
                self.empty_extents[index] = None
                self.returned.append(index)
                # Ascending again, so that the next sequence in it is contiguous.
                extent.plain.sort(reverse=True)
                extent.newest_rank = 0.0
            else:
                self.idle_extents[index] = None
        self._file(index, extent)

    def _file(self, index: int, extent: Extent) -> None:
        """Put an extent into its class of fullness; full and wholly plain ones are in none."""
        level = -1
        if extent.plain and len(extent.plain) < self.extent_blocks:
            level = extent.live_blocks * _LEVELS // self.extent_blocks
        if level != extent.level:
            if extent.level >= 0:
                del self._by_level[extent.level][index]
            if level >= 0:
                self._by_level[level][index] = None
            extent.level = level

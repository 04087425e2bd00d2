"""The KV memory of the simulated device: a row of granules, and in each block the content of what was written there.

Blocks of two groups may lie in the same granules one after the other, as extents are lent. Whoever writes wipes what
lay there before; if that was still somebody's, it is a fault at once. Must not know plans or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.sim.oracle import VOID
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    KvLayout,
    RecurrentSpec,
    SlidingWindowSpec,
    kind_of,
)


class SimFault(AssertionError):
    """The system under test did something that must never happen."""


def demand(condition: bool, message: str) -> None:
    """Raise `SimFault` unless the condition holds."""
    if not condition:
        raise SimFault(message)


class GroupShape:
    """What the cells of one group's blocks stand for.

    Attributes:
        group: index.
        kind: of its spec.
        block_tokens: tokens of a block; 0 for a state.
        ratio_tokens: tokens under one cell.
        block_cells: cells of a block: records, or 1 for a state.
        by_token: cells belong to positions of the sequence (not a state, not the encoder's).
    """

    __slots__ = (
        "_chunk_tokens",
        "_window_tokens",
        "block_cells",
        "block_granules",
        "block_tokens",
        "by_token",
        "group",
        "kind",
        "ratio_tokens",
    )

    def __init__(self, layout: GroupLayout) -> None:
        spec = layout.spec
        self.group = layout.group
        self.kind = kind_of(spec)
        self.block_tokens = layout.block_tokens
        self.block_granules = layout.block_granules
        self.ratio_tokens = spec.ratio_tokens if isinstance(spec, CompressedSpec | IndexKeysSpec) else 1
        self.block_cells = layout.block_tokens // self.ratio_tokens or 1
        self.by_token = not isinstance(spec, RecurrentSpec | CrossAttentionSpec)
        self._window_tokens = spec.window_tokens if isinstance(spec, SlidingWindowSpec) else 0
        self._chunk_tokens = spec.chunk_tokens if isinstance(spec, ChunkedLocalSpec) else 0

    def first_read(self, start: int) -> int:
        """Return the first position that a row reads which begins at ``start``; a position reads itself."""
        if self._window_tokens:
            return max(0, start - self._window_tokens + 1)
        if self._chunk_tokens:
            return start // self._chunk_tokens * self._chunk_tokens
        return 0

    def is_read_behind(self, unit_tokens: int) -> bool:
        """Return whether a resume at some multiple of ``unit_tokens`` reads what lies before it in this group."""
        whole_chunks = self._chunk_tokens and unit_tokens % self._chunk_tokens == 0
        return self.by_token and self._window_tokens != 1 and not whole_chunks

    def first_block(self, computed_tokens: int) -> int:
        """Return the first place of a table that is still read once so many tokens are computed."""
        return self.first_read(computed_tokens) // self.block_tokens if self.block_tokens else 0


class Cells:
    """Contents by group and block."""

    def __init__(self, layout: KvLayout, is_owned: Callable[[int, BlockId], bool]) -> None:
        """Make a memory in which nothing was ever written.

        Args:
            layout: groups, granules and extents.
            is_owned: whether a block is in some table, is published, or waits for a load: then nobody may write into
                its granules under another name.
        """
        self.shapes = [GroupShape(group) for group in layout.groups]
        self._is_owned = is_owned
        self._end = layout.null_granules + layout.extent_granules * layout.num_extents
        self._first = layout.null_granules
        self._extent_granules = layout.extent_granules
        self._holders: list[tuple[int, BlockId] | None] = [None] * self._end
        self.blocks: list[dict[BlockId, list[int]]] = [{} for _ in layout.groups]
        """Per group, the cells of each block that nobody has overwritten since."""

    def writable(self, group: int, block: BlockId) -> list[int]:
        """Return the cells of a block to write into; whatever else lay in its granules is lost."""
        cells = self.blocks[group].get(block)
        return self._claim(group, block) if cells is None else cells

    def _claim(self, group: int, block: BlockId) -> list[int]:
        shape = self.shapes[group]
        end = block + shape.block_granules
        offset = (block - self._first) % self._extent_granules
        if not (block != NULL_BLOCK and self._first <= block and end <= self._end):
            raise SimFault(f"block {block} of group {group} lies outside of the memory")
        aligned = offset % shape.block_granules == 0 and offset + shape.block_granules <= self._extent_granules
        demand(aligned, f"block {block} of group {group} does not begin where a block can begin")
        for granule in range(block, end):
            holder = self._holders[granule]
            if holder is not None and holder != (group, block):
                self._wipe(*holder, by=(group, block))
        self._holders[block:end] = [(group, block)] * shape.block_granules
        cells = self.blocks[group][block] = [VOID] * shape.block_cells
        return cells

    def _wipe(self, group: int, block: BlockId, *, by: tuple[int, BlockId]) -> None:
        if self._is_owned(group, block):
            raise SimFault(f"block {by[1]} of group {by[0]} overwrites block {block} of group {group}, in use")
        del self.blocks[group][block]
        self._holders[block : block + self.shapes[group].block_granules] = [None] * self.shapes[group].block_granules

    def copy(self, group: int, source: BlockId, target: BlockId) -> None:
        """Copy a whole block."""
        content = self.blocks[group].get(source)
        self.writable(group, target)[:] = [VOID] * self.shapes[group].block_cells if content is None else content

    def write(self, group: int, table: list[BlockId], start: int, end: int, contents: list[int]) -> None:
        """Write the positions ``[start, end)`` of a sequence: every cell whose last token is among them.

        Args:
            group: one whose cells belong to positions.
            table: of the sequence.
            start: first position.
            end: behind the last position; the table reaches as far.
            contents: of all positions from 0.
        """
        shape = self.shapes[group]
        ratio, per_block = shape.ratio_tokens, shape.block_cells
        first, last = start // ratio, end // ratio
        while first < last:
            index, offset = divmod(first, per_block)
            count = min(per_block - offset, last - first)
            cells = self.writable(group, table[index])
            # The last token of cell c is (c + 1) * ratio - 1.
            cells[offset : offset + count] = contents[(first + 1) * ratio - 1 : (first + count) * ratio : ratio]
            first += count

    def wrong_cell(
        self, group: int, table: list[BlockId], start: int, end: int, contents: list[int]
    ) -> tuple[int, BlockId, int | None, int] | None:
        """Compare the positions ``[start, end)`` with what must be there.

        Returns:
            None, or (position, block, found, wanted) of the first that is wrong; found None: nothing is there.
        """
        shape = self.shapes[group]
        ratio, per_block = shape.ratio_tokens, shape.block_cells
        if ratio != 1:
            contents = contents[ratio - 1 : end : ratio]
            start, end = start // ratio, end // ratio
        blocks = self.blocks[group]
        while start < end:
            index, offset = divmod(start, per_block)
            count = min(per_block - offset, end - start)
            cells = blocks.get(table[index])
            wanted = contents[start : start + count]
            if cells is None or cells[offset : offset + count] != wanted:
                return self._first_wrong(table[index], cells, offset, wanted, start, ratio)
            start += count
        return None

    @staticmethod
    def _first_wrong(
        block: BlockId, cells: list[int] | None, offset: int, wanted: Iterable[int], start: int, ratio: int
    ) -> tuple[int, BlockId, int | None, int]:
        for place, content in enumerate(wanted):
            found = None if cells is None else cells[offset + place]
            if found != content:
                return (start + place + 1) * ratio - 1, block, found, content
        raise SimFault("a block differs nowhere")

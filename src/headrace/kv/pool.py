"""The blocks of one group: reference counts, the free list in LRU order, and the map from prefix hash to blocks.

A freed block keeps its hash and can be hit until it is handed out again: freed is not evicted. Must not know requests,
tokens beyond those in events, or other groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.base.errors import InvariantError, invariant
from headrace.base.ids import NULL_BLOCK, BlockId, GroupId
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class BlockPool:
    """All blocks of one group but the null block, which is a placeholder: never counted, referenced or freed."""

    def __init__(self, group: GroupId, num_blocks: int, *, record_events: bool = False) -> None:
        """Make a pool in which every block is free and nothing is cached.

        Args:
            group: for events.
            num_blocks: blocks in memory, the null block included; at least 2.
            record_events: keep events until `take_events`; without a taker they would pile up.
        """
        invariant(num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}")
        self._group = group
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        # A key may have several blocks: two requests can compute one prefix side by side, and tables are append-only.
        self._blocks_of: dict[bytes, list[BlockId]] = {}
        # Least recently used first. An OrderedDict is a doubly linked list with O(1) removal from the middle.
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(BlockId(i) for i in range(1, num_blocks))
        self._cached_blocks = 0
        self._evicted_blocks = 0
        self._record_events = record_events
        self._events: list[KvEvent] = []

    @property
    def total_blocks(self) -> int:
        """Usable blocks; the null block is not one."""
        return len(self._references) - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that no request references; their cached content may still be hit."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks, in use or free, that carry a prefix hash."""
        return self._cached_blocks

    @property
    def evicted_blocks(self) -> int:
        """How often a cached block has been handed out again since the start."""
        return self._evicted_blocks

    def references(self, block: BlockId) -> int:
        """Return how many owners a block has."""
        return self._references[block]

    def free_list(self) -> list[BlockId]:
        """Return the free blocks, next to be handed out first."""
        return list(self._free)

    def hash_of(self, block: BlockId) -> bytes | None:
        """Return the prefix hash under which a block is cached."""
        return self._hash_of[block]

    def cached_hashes(self) -> set[bytes]:
        """Return all hashes that can be hit."""
        return set(self._blocks_of)

    def find(self, block_hash: bytes) -> BlockId | None:
        """Return a block with this content, one in use rather than a free one, or None."""
        blocks = self._blocks_of.get(block_hash)
        if blocks is None:
            return None
        if len(blocks) > 1:
            for block in blocks:
                if self._references[block]:
                    return block
        return blocks[0]

    def idle(self, blocks: Iterable[BlockId]) -> int:
        """Return how many of these blocks are on the free list (touching them makes the free list shorter)."""
        references = self._references
        return sum(1 for block in blocks if block != NULL_BLOCK and not references[block])

    def allocate(self, count_blocks: int) -> list[BlockId]:
        """Hand out the least recently used free blocks, evicting what they cached.

        Mutates: free list, references, cache.
        Requires: ``count_blocks <= free_blocks``.
        """
        # Not `invariant`: on a hot path its message would be formatted each time.
        if count_blocks > len(self._free):
            raise InvariantError(f"group {self._group}: {count_blocks} blocks asked for, {len(self._free)} free")
        taken: list[BlockId] = []
        for _ in range(count_blocks):
            block, _ = self._free.popitem(last=False)
            if self._hash_of[block] is not None:
                self._evicted_blocks += 1
                self._unpublish(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each block, taking it off the free list if it lies there.

        Mutates: free list, references.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def free(self, table: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a table, tail first, so that shared beginnings are evicted last.

        Blocks without a hash hold nothing that could be hit, so they are the next to be handed out.

        Mutates: free list, references.
        Requires: the caller owns a reference to each block and forgets the table.
        """
        references = self._references
        for block in reversed(table):
            if block == NULL_BLOCK:
                continue
            if references[block] < 1:
                raise InvariantError(f"block {block} of group {self._group} is freed without an owner")
            references[block] -= 1
            if references[block]:
                continue
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def publish(self, block: BlockId, block_hash: bytes, parent_hash: bytes | None, token_ids: Sequence[int]) -> None:
        """Make a full block hittable.

        Args:
            block: in use, not published.
            block_hash: of the prefix that ends with this block.
            parent_hash: of the prefix before it, for the event.
            token_ids: the block's tokens, for the event.

        Mutates: cache.
        Requires: the block's contents are complete on the device and will not be written again.
        """
        if not self._references[block] or self._hash_of[block] is not None:
            raise InvariantError(f"block {block} of group {self._group} is free or published already")
        self._hash_of[block] = block_hash
        self._cached_blocks += 1
        blocks = self._blocks_of.get(block_hash)
        if blocks is not None:
            blocks.append(block)
            return
        self._blocks_of[block_hash] = [block]
        if self._record_events:
            tokens = list(token_ids)
            self._events.append(BlockStored(self._group, "full", block_hash, parent_hash, tokens, len(tokens)))

    def forget(self, block_hash: bytes) -> None:
        """Make every block with this content unhittable. Unknown hashes are ignored.

        Mutates: cache, order of the free list.
        """
        for block in list(self._blocks_of.get(block_hash, ())):
            self._unpublish(block)
            if not self._references[block]:
                self._free.move_to_end(block, last=False)

    def forget_idle(self) -> None:
        """Make every block unhittable that nobody references.

        Mutates: cache.
        """
        if len(self._free) < self.total_blocks:
            for block in self._free:
                if self._hash_of[block] is not None:
                    self._unpublish(block)
            return
        self._hash_of = [None] * len(self._hash_of)
        self._blocks_of.clear()
        self._cached_blocks = 0
        if self._record_events:
            self._events.append(AllBlocksCleared(self._group))

    def take_events(self) -> list[KvEvent]:
        """Return the events since the last call, oldest first.

        Mutates: the record of events.
        """
        events, self._events = self._events, []
        return events

    def _unpublish(self, block: BlockId) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        self._cached_blocks -= 1
        blocks = self._blocks_of[block_hash]
        blocks.remove(block)
        if blocks:
            return
        del self._blocks_of[block_hash]
        if self._record_events:
            self._events.append(BlockRemoved(self._group, block_hash))

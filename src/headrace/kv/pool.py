"""The blocks of one group: reference counts, what is idle, and the map from prefix hash to blocks.

A freed block keeps its content and can be hit until it is handed out again: freed is not evicted. Where free blocks
lie is `kv.placement`'s work, which idle block goes first is `kv.eviction`'s. Must not know requests, tokens beyond
those in events, or other groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, MutableSequence, Sequence

from headrace.base.errors import InvariantError
from headrace.base.ids import NULL_BLOCK, BlockId, GroupId
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, parents_first, window_tokens_of
from headrace.kv.eviction import EvictionPolicy
from headrace.kv.placement import Placement
from headrace.kv.prefix_hash import ExtraKey
from headrace.types.cache_specs import GroupLayout, kind_of

_RUN_HASHES = 256
_VICTIM_CANDIDATES = 8
"""So many of the next blocks to evict are looked at for one in a nearly empty extent."""


class BlockPool:
    """The blocks that one group has now. The null block is a placeholder: never counted, referenced or freed."""

    def __init__(
        self,
        layout: GroupLayout,
        placement: Placement,
        policy: EvictionPolicy,
        references: MutableSequence[int],
        *,
        record_events: bool = False,
    ) -> None:
        """Make a pool in which every block is free and nothing is cached.

        Args:
            layout: of the group.
            placement: its free blocks.
            policy: order of eviction.
            references: owners by block id; shared by the pools of a memory, whose ids never overlap.
            record_events: keep events until `take_events`; without a taker they would pile up.
        """
        self.layout = layout
        self.placement = placement
        self.policy = policy
        self._group = GroupId(layout.group)
        self._references = references
        self._hashes_of: dict[BlockId, tuple[bytes, ...]] = {}
        # By block, and left behind when its hashes go: the next content overwrites it.
        self._root_of: dict[BlockId, bytes] = {}
        self._block_of: dict[bytes, BlockId] = {}
        # Further blocks of a hash: two requests can compute one prefix side by side, and tables are append-only.
        self._others_of: dict[bytes, list[BlockId]] = {}
        self._evicted_blocks = 0
        self._record_events = record_events
        self._events: list[KvEvent] = []
        self._stored: dict[bytes, BlockStored] = {}
        self._kind, self._window_tokens = kind_of(layout.spec), window_tokens_of(layout.spec)

    @property
    def total_blocks(self) -> int:
        """Blocks of the group's extents now; the null block is not one."""
        return self.placement.own_blocks

    @property
    def most_blocks(self) -> int:
        """Blocks that the group would have if it had the whole memory."""
        return self.layout.num_blocks - 1

    @property
    def plain_blocks(self) -> int:
        """Free blocks that cache nothing."""
        return self.placement.plain_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of the group's own extents that nobody references; their cached content may still be hit."""
        return self.placement.plain_blocks + len(self.policy)

    @property
    def live_blocks(self) -> int:
        """Blocks with an owner."""
        return self.placement.own_blocks - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks, in use or idle, that carry a prefix hash."""
        return len(self._hashes_of)

    @property
    def evicted_blocks(self) -> int:
        """How often a cached block has lost its content to make room since the start."""
        return self._evicted_blocks

    def references(self, block: BlockId) -> int:
        """Return how many owners a block has."""
        return self._references[block]

    def block_ids(self) -> list[BlockId]:
        """Return the ids of all blocks of the group's extents now, ascending."""
        return self.placement.block_ids()

    def free_list(self) -> list[BlockId]:
        """Return the blocks without an owner: first those that cache nothing, then the idle ones in eviction order."""
        return [*self.placement.plain_list(), *self.policy]

    def idle_list(self) -> list[BlockId]:
        """Return the blocks that cache something and have no owner, the next to be evicted first."""
        return list(self.policy)

    def hashes_of(self, block: BlockId) -> Sequence[bytes]:
        """Return the prefix hashes under which a block is cached, in the order of their positions."""
        return self._hashes_of.get(block, ())

    def cached_hashes(self) -> set[bytes]:
        """Return all hashes that can be hit."""
        return set(self._block_of)

    def find(self, block_hash: bytes) -> BlockId | None:
        """Return a block whose content is right up to this hash, one in use rather than an idle one, or None."""
        block = self._block_of.get(block_hash)
        if block is None or self._references[block]:
            return block
        for other in self._others_of.get(block_hash, ()):
            if self._references[other]:
                return other
        return block

    def find_run(self, hashes: Sequence[bytes]) -> list[BlockId]:
        """Return what `find` returns for each of these hashes, up to the first that is not cached.

        A long prompt has thousands: they are looked up some at a time by C code.
        """
        found: list[BlockId] = []
        block_of = self._block_of
        for start in range(0, len(hashes), _RUN_HASHES):
            piece = hashes[start : start + _RUN_HASHES]
            try:
                found += list(map(block_of.__getitem__, piece))
            except KeyError:
                found += [block_of[known] for known in itertools.takewhile(block_of.__contains__, piece)]
                break
        if self._others_of:
            for place, block_hash in enumerate(hashes[: len(found)]):
                if block_hash in self._others_of:
                    found[place] = self.find(block_hash) or NULL_BLOCK
        return found

    def idle(self, blocks: Iterable[BlockId]) -> int:
        """Return how many of these blocks have no owner (touching them leaves fewer free blocks)."""
        references = self._references
        return sum(1 for block in blocks if block != NULL_BLOCK and not references[block])

    def allocate(self, count_blocks: int, table: Sequence[BlockId] = ()) -> list[BlockId]:
        """Hand out blocks, first those that cache nothing, then evicting.

        Args:
            count_blocks: how many.
            table: the table that they will extend: they come from the same extent if possible.

        Mutates: free blocks, references, cache.
        Requires: ``count_blocks <= free_blocks``; with several groups `KvMemory.reserve` sees to it.
        """
        placement = self.placement
        missing = count_blocks - placement.plain_blocks
        if missing <= 0:
            taken = placement.take(count_blocks, table)
        elif missing > len(self.policy):
            # Not `invariant`: on a hot path its message would be formatted each time.
            raise InvariantError(f"group {self._group}: {count_blocks} blocks asked for, {self.free_blocks} free")
        elif placement.shares_memory:
            self.evict(missing)
            taken = placement.take(count_blocks, table)
        else:
            # Where a block lies does not matter: what is evicted is handed out at once.
            victims = self.policy.take(missing)
            self._evicted_blocks += missing
            self._drop(victims)
            plain = count_blocks - missing
            taken = placement.take(plain, table) + victims if plain else victims
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def evict(self, count_blocks: int) -> None:
        """Make idle blocks plain, in the order of the policy.

        Mutates: free blocks, cache.
        Requires: so many idle blocks.
        """
        victims = []
        for _ in range(count_blocks):
            victim = self.placement.victim(self.policy.first(_VICTIM_CANDIDATES))
            self.policy.evict(victim)
            victims.append(victim)
        self._evicted_blocks += count_blocks
        self._drop(victims)
        self.placement.emptied(victims)

    def evict_all(self, blocks: Iterable[BlockId]) -> None:
        """Make these blocks plain as far as they are idle; the group gives up their extent.

        Mutates: free blocks, cache.
        """
        victims = [block for block in blocks if block in self.policy]
        for block in victims:
            self.policy.evict(block)
        self._evicted_blocks += len(victims)
        self._drop(victims)
        self.placement.emptied(victims)

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each block; an idle one is idle no more.

        Mutates: free blocks, references.
        """
        references = self._references
        woken: list[BlockId] = []
        for block in blocks:
            owners = references[block]
            if not owners:
                if block == NULL_BLOCK:
                    continue
                woken.append(block)
            references[block] = owners + 1
        if woken:
            self.policy.remove(woken)
            self.placement.touched(woken)
        if self.policy.counts_uses:
            self.policy.used([block for block in blocks if block != NULL_BLOCK])

    def free(self, table: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a table, tail first, so that shared beginnings are evicted last.

        Blocks without a hash hold nothing that could be hit, so they are the next to be handed out.

        Mutates: free blocks, references.
        Requires: the caller owns a reference to each block and forgets the table.
        """
        references, hashes_of = self._references, self._hashes_of
        plain: list[BlockId] = []
        idle: list[BlockId] = []
        for block in reversed(table):
            left = references[block] - 1
            if left > 0:
                references[block] = left
                continue
            if block == NULL_BLOCK:
                continue
            if left < 0:
                raise InvariantError(f"block {block} of group {self._group} is freed without an owner")
            references[block] = 0
            (idle if block in hashes_of else plain).append(block)
        rank = self.policy.add(idle) if idle else 0.0
        if plain or idle:
            self.placement.freed(plain, idle, rank)

    def publish(
        self,
        block: BlockId,
        block_hash: bytes,
        root_hash: bytes | None = None,
        *,
        parent_hash: bytes | None = None,
        token_ids: Sequence[int] = (),
        extras: Sequence[ExtraKey] = (),
    ) -> None:
        """Make a block hittable up to the boundary of a hash unit. A block may carry several, in order of position.

        Args:
            block: in use.
            block_hash: of the prefix that ends at the boundary.
            root_hash: of the first unit of that prefix, None if it is the first; one for all that a block carries.
            parent_hash: of the prefix one unit before it, for the event.
            token_ids: the unit's tokens, for the event.
            extras: the unit's extra keys, for the event.

        Mutates: cache.
        Requires: the content up to the boundary is complete on the device and will not be written again.
        """
        if not self._references[block]:
            raise InvariantError(f"block {block} of group {self._group} is published without an owner")
        carried = self._hashes_of.get(block)
        if carried is None:
            self._hashes_of[block] = (block_hash,)
            self._root_of[block] = root_hash or block_hash
        elif block_hash in carried:
            raise InvariantError(f"block {block} of group {self._group} is published twice under one hash")
        else:
            self._hashes_of[block] = (*carried, block_hash)
        if block_hash in self._block_of:
            self._others_of.setdefault(block_hash, []).append(block)
            return
        self._block_of[block_hash] = block
        if self._record_events:
            tokens = list(token_ids)
            event = BlockStored(
                self._group,
                self._kind,
                block_hash,
                parent_hash,
                tokens,
                len(tokens),
                self._window_tokens,
                list(extras),
            )
            self._stored[block_hash] = event
            self._events.append(event)

    def retract(self, block: BlockId, kept_hashes: int) -> None:
        """Take the later hashes off a block, because what lies behind is going to be written again.

        Args:
            block: in use.
            kept_hashes: so many stay, from the first.

        Mutates: cache.
        """
        if not self._references[block]:
            raise InvariantError(f"block {block} of group {self._group} is to be written again without an owner")
        carried = self._hashes_of.get(block, ())
        kept = carried[:kept_hashes]
        for block_hash in carried[kept_hashes:]:
            self._remove_holder(block_hash, block)
        if kept:
            self._hashes_of[block] = kept
        else:
            self._hashes_of.pop(block, None)
            if self.policy.counts_uses:
                self.policy.dropped([block])

    def forget_from(self, root_hash: bytes) -> None:
        """Make everything unhittable whose prefix begins with this unit.

        Mutates: cache, free blocks.
        """
        roots = self._root_of
        for block in [block for block in self._hashes_of if roots[block] == root_hash]:
            for block_hash in self._hashes_of.get(block, ()):
                self.forget(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Make this content unhittable in every block. Unknown hashes are ignored.

        Mutates: cache, free blocks.
        """
        bare: list[BlockId] = []
        if block_hash not in self._block_of:
            return
        for block in (self._block_of[block_hash], *self._others_of.pop(block_hash, ())):
            left = tuple(carried for carried in self._hashes_of[block] if carried != block_hash)
            if left:
                self._hashes_of[block] = left
                continue
            del self._hashes_of[block]
            if not self._references[block]:
                bare.append(block)
            if self.policy.counts_uses:
                self.policy.dropped([block])
        self._remove_key(block_hash)
        if bare:
            self.policy.remove(bare)
            self.placement.emptied(bare)

    def forget_idle(self) -> None:
        """Make every block unhittable that nobody references.

        Mutates: cache, free blocks.
        """
        blocks = list(self.policy)
        if len(blocks) == len(self._hashes_of):
            # Nothing stays: one event says so.
            self._hashes_of.clear()
            self._block_of.clear()
            self._others_of.clear()
            self._stored.clear()
            if self._record_events and blocks:
                self._events.append(AllBlocksCleared(self._group))
            if self.policy.counts_uses:
                self.policy.dropped(blocks)
        else:
            self._drop(blocks)
        self.policy.remove(blocks)
        self.placement.emptied(blocks)

    def take_events(self) -> list[KvEvent]:
        """Return the events since the last call, oldest first.

        Mutates: the record of events.
        """
        events, self._events = self._events, []
        return events

    def snapshot_events(self) -> list[BlockStored]:
        """Return events that build the present set of hittable hashes from nothing, parents before children.

        Requires: events are recorded.
        """
        return parents_first(list(self._stored.values()))

    def _drop(self, blocks: list[BlockId]) -> None:
        """Take the hashes off blocks."""
        pop, block_of, others_of, events = self._hashes_of.pop, self._block_of, self._others_of, self._record_events
        for block in blocks:
            for block_hash in pop(block):
                if events or block_hash in others_of:
                    self._remove_holder(block_hash, block)
                else:
                    del block_of[block_hash]
        if self.policy.counts_uses:
            self.policy.dropped(blocks)

    def _remove_holder(self, block_hash: bytes, block: BlockId) -> None:
        """A block no longer carries a hash."""
        others = self._others_of.get(block_hash)
        if others is None:
            self._remove_key(block_hash)
            return
        if self._block_of[block_hash] == block:
            self._block_of[block_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others_of[block_hash]

    def _remove_key(self, block_hash: bytes) -> None:
        del self._block_of[block_hash]
        if self._record_events:
            del self._stored[block_hash]
            self._events.append(BlockRemoved(self._group, block_hash))

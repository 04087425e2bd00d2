"""The KV memory of a rank: a row of granules, cut into extents that are lent to one group's pool at a time.

It answers for all groups together whether blocks can be had, and moves extents so that they can. Must not know
sequences, tokens or hits; it never moves or copies a block.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

from headrace.base.errors import InvariantError, invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.eviction import Inflation, make_policy
from headrace.kv.placement import ExtentRows, SingleRow
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout, KvLayout

_STATE_TOKENS = 4096
"""Tokens that are computed again, on average, when a checkpoint of a recurrent state is lost: an interval of them."""
_DONOR_CANDIDATES = 8
"""So many of the longest idle extents of a group are compared by rank."""


@dataclass(frozen=True)
class MemoryUsage:
    """Where the bytes of the memory are.

    Attributes:
        total_bytes: all of it.
        live_bytes: blocks with an owner, padding left out.
        cached_bytes: blocks without an owner that can still be hit, padding left out.
        unassigned_bytes: extents that no group has.
        plain_bytes: blocks of lent extents that hold nothing: only their group can use them.
        lost_bytes: null blocks, ends of extents that hold no whole block, padding of blocks.
        group_live_bytes: ``live_bytes`` by group.
    """

    total_bytes: int
    live_bytes: int
    cached_bytes: int
    unassigned_bytes: int
    plain_bytes: int
    lost_bytes: int
    group_live_bytes: list[int]


class KvMemory:
    """All pools of a rank, and the extents between them."""

    def __init__(self, layout: KvLayout, *, eviction: str = "lru", record_events: bool = False) -> None:
        """Make empty pools.

        Args:
            layout: groups, granules and extents.
            eviction: name of the policy, one of `kv.eviction.POLICIES`.
            record_events: record cache events in the pools.

        Raises:
            ConfigError: unknown policy.
        """
        invariant(len(layout.groups) > 0, "a KV memory needs at least one group")
        invariant(layout.granule_bytes > 0 and layout.num_extents > 0, "a layout without granules has no memory")
        self.layout = layout
        self._first_granule = layout.null_granules
        inflation = Inflation()
        self._rows: list[ExtentRows] = []
        self.pools: list[BlockPool] = []
        self._unassigned: list[int] = []
        single = len(layout.groups) == 1
        # A list is read a little faster. Granules of several groups are far more than blocks, so they are kept small.
        ids = self._first_granule + layout.extent_granules * layout.num_extents
        references: MutableSequence[int] = [0] * ids if single else array("i", [0]) * ids
        self._references = references
        for group in layout.groups:
            usable = layout.extent_granules // group.block_granules
            invariant(usable > 0, f"group {group.group}: a block is larger than an extent")
            placement: SingleRow | ExtentRows
            if single:
                placement = SingleRow(self._all_blocks(group))
            else:
                placement = ExtentRows(
                    first_granule=self._first_granule,
                    extent_granules=layout.extent_granules,
                    block_granules=group.block_granules,
                )
                self._rows.append(placement)
            policy = make_policy(eviction, inflation, _worth(group))
            self.pools.append(BlockPool(group, placement, policy, references, record_events=record_events))
        if not single:
            self._unassigned = list(range(layout.num_extents - 1, -1, -1))

    @property
    def owners(self) -> Sequence[int]:
        """Number of owners by block id, of all groups together; to look at, not to change."""
        return self._references

    @property
    def unassigned_extents(self) -> int:
        """Extents that no group has."""
        self._collect()
        return len(self._unassigned)

    def can_take(
        self,
        demand_blocks: Sequence[int],
        kept_blocks: Sequence[int] = (),
        pinned: Sequence[Sequence[BlockId]] = (),
    ) -> bool:
        """Return whether all groups together can have so many free blocks.

        Args:
            demand_blocks: per group; idle blocks that a hit is going to pin count as demand.
            kept_blocks: per group, free blocks that must be left over; none if empty.
            pinned: per group, the blocks of the hit. Extents with idle ones among them cannot change hands. Without
                it the answer may be yes although pinning them first leaves too little.
        """
        if len(self.pools) == 1:
            return demand_blocks[0] + (kept_blocks[0] if kept_blocks else 0) <= self.pools[0].free_blocks
        if kept_blocks:
            demand_blocks = [demand + kept for demand, kept in zip(demand_blocks, kept_blocks, strict=True)]
        for demand, pool in zip(demand_blocks, self.pools, strict=True):
            if demand > pool.free_blocks:
                return self._missing_extents(demand_blocks, pinned) <= 0
        return True

    def reserve(self, demand_blocks: Sequence[int]) -> bool:
        """Move extents between the groups so that each pool has its demand free.

        First come extents that no group has. Then a group evicts its own idle blocks, or takes a wholly idle extent of
        another group, whichever ranks lower in the order of eviction. What one group needs is never taken for another.

        Args:
            demand_blocks: per group.

        Returns:
            False if it cannot be done; then nothing has changed.

        Mutates: pools, extents.
        """
        if len(self.pools) == 1:
            return demand_blocks[0] <= self.pools[0].free_blocks
        self._collect()
        for demand, pool in zip(demand_blocks, self.pools, strict=True):
            if demand > pool.plain_blocks:
                return self._move(demand_blocks)
        return True

    def usage(self) -> MemoryUsage:
        """Return where the bytes are."""
        unassigned = self.unassigned_extents * self.layout.extent_granules * self.layout.granule_bytes
        group_live = [pool.live_blocks * pool.layout.block_bytes() for pool in self.pools]
        cached = sum(len(pool.policy) * pool.layout.block_bytes() for pool in self.pools)
        plain = sum(pool.plain_blocks * pool.layout.block_bytes() for pool in self.pools)
        total, live = self.layout.total_bytes(), sum(group_live)
        lost = total - live - cached - plain - unassigned
        return MemoryUsage(total, live, cached, unassigned, plain, lost, group_live)

    def held_granules(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Return the granules of the blocks in a sequence's tables, shared ones included; for quotas.

        Args:
            tables: per group.
        """
        return sum(
            (len(table) - table.count(NULL_BLOCK)) * pool.layout.block_granules
            for pool, table in zip(self.pools, tables, strict=True)
        )

    @property
    def total_granules(self) -> int:
        """Granules that can be lent, for quotas."""
        return self.layout.extent_granules * self.layout.num_extents

    def extents_of(self, group: int) -> list[int]:
        """Return the extents that a group has now; one group alone has them all."""
        if len(self.pools) == 1:
            return list(range(self.layout.num_extents))
        self._collect()
        return sorted(self._rows[group].extents)

    def _all_blocks(self, group: GroupLayout) -> list[BlockId]:
        """Return the ids of all blocks of a group that has every extent."""
        per_extent = self.layout.extent_granules // group.block_granules
        return [
            BlockId(self._first_granule + extent * self.layout.extent_granules + place * group.block_granules)
            for extent in range(self.layout.num_extents)
            for place in range(per_extent)
        ]

    def _missing_extents(self, demand_blocks: Sequence[int], pinned: Sequence[Sequence[BlockId]] = ()) -> int:
        """Return how many extents are wanting if each group gets its demand; 0 or less: it can be done.

        An idle block counts for its own group's demand or as part of an extent given away, never as both.
        """
        missing = -self.unassigned_extents
        for place, demand in enumerate(demand_blocks):
            rows, spare = self._rows[place], self.pools[place].free_blocks - demand
            if spare < 0:
                missing -= spare // rows.extent_blocks
            else:
                movable = len(rows.idle_extents) + len(rows.empty_extents)
                if pinned:
                    movable -= self._pinned_extents(rows, pinned[place])
                missing -= min(movable, spare // rows.extent_blocks)
        return missing

    def _pinned_extents(self, rows: ExtentRows, blocks: Sequence[BlockId]) -> int:
        """Return how many wholly idle extents a hit would wake."""
        touched = {rows.extent_of(block) for block in blocks if block != NULL_BLOCK}
        return sum(1 for extent in touched if extent in rows.idle_extents)

    def _collect(self) -> None:
        """Take back the extents that have become empty."""
        for rows in self._rows:
            if rows.returned:
                for extent in rows.returned:
                    if extent in rows.empty_extents:
                        rows.drop_extent(extent)
                        self._unassigned.append(extent)
                rows.returned.clear()

    def _lend(self, place: int) -> bool:
        """Lend an unassigned extent to a pool, if there is one."""
        if not self._unassigned:
            self._collect()
            if not self._unassigned:
                return False
        self._rows[place].add_extent(self._unassigned.pop())
        return True

    def _move(self, demand_blocks: Sequence[int]) -> bool:
        if self._missing_extents(demand_blocks) > 0:
            return False
        # Those who cannot help themselves come first: the others must not use up what these depend on.
        for place, demand in enumerate(demand_blocks):
            pool = self.pools[place]
            while demand > pool.free_blocks:
                if not self._lend(place):
                    donor = self._cheapest_donor(place, demand_blocks)
                    if donor is None:
                        raise InvariantError("an extent that was counted is gone")
                    self._take_from(*donor)
        for place, demand in enumerate(demand_blocks):
            pool = self.pools[place]
            while demand > pool.plain_blocks:
                if self._lend(place):
                    continue
                donor = self._cheapest_donor(place, demand_blocks)
                own = pool.policy.first(1)
                if donor is not None and (not own or donor[2] < pool.policy.rank(own[0])):
                    self._take_from(*donor)
                else:
                    pool.evict(1)
                    # An extent that this has emptied is part of the demand now: no other group may collect it.
                    self._rows[place].returned.clear()
        # An extent that this has emptied is part of a demand now: it stays where it is.
        for rows in self._rows:
            rows.returned.clear()
        return True

    def _cheapest_donor(self, receiver: int, demand_blocks: Sequence[int]) -> tuple[int, int, float] | None:
        """Return (group, extent, rank) of the extent of another group that is the first to go, or None."""
        best: tuple[int, int, float] | None = None
        for place, rows in enumerate(self._rows):
            spare = self.pools[place].free_blocks - demand_blocks[place]
            if place == receiver or spare < rows.extent_blocks:
                continue
            if rows.empty_extents:
                return place, next(iter(rows.empty_extents)), -1.0
            for extent, _ in zip(rows.idle_extents, range(_DONOR_CANDIDATES), strict=False):
                rank = rows.extents[extent].newest_rank
                if best is None or rank < best[2]:
                    best = (place, extent, rank)
        return best

    def _take_from(self, place: int, extent: int, rank: float) -> None:
        """Take a wholly idle extent from a group and leave it unassigned."""
        rows = self._rows[place]
        if extent not in rows.empty_extents:
            self.pools[place].evict_all(BlockId(block) for block in rows.blocks_of(extent))
            return
        rows.drop_extent(extent)
        self._unassigned.append(extent)


def _worth(group: GroupLayout) -> float:
    """Return the tokens that must be computed again without a block, a byte of it."""
    return (group.block_tokens or _STATE_TOKENS) / max(1, group.block_bytes())

"""Any order of reserving, allocating, publishing, sharing, freeing and forgetting keeps the memory's books right."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.base.ids import BlockId
from headrace.kv.budget import fixed_layout
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.kv.memory import KvMemory
from headrace.types.cache_specs import FullAttentionSpec, LayerCache, RecurrentSpec, StatePart

SPECS = [FullAttentionSpec(1, 8, 8, 2), FullAttentionSpec(2, 8, 8, 2), RecurrentSpec((StatePart("s", (160,), 4),))]


class MemoryMachine(RuleBasedStateMachine):
    """The real memory beside what a reader of the contract would write down."""

    @initialize(groups=st.integers(1, 3), extents=st.integers(2, 5), eviction=st.sampled_from(["lru", "cost"]))
    def start(self, groups: int, extents: int, eviction: str) -> None:
        caches = [LayerCache(index, SPECS[index]) for index in range(groups)]
        layout = fixed_layout(caches, block_tokens=4, usable_blocks=[1] * (groups - 1) + [extents])
        self.memory = KvMemory(layout, eviction=eviction, record_events=True)
        self.tables: list[tuple[int, list[BlockId]]] = []
        self.replayed: list[set[bytes]] = [set() for _ in range(groups)]
        self.names = 0
        # What was ever published in a block since it was last handed out.
        self.content: list[dict[BlockId, set[bytes]]] = [{} for _ in range(groups)]

    def owners(self) -> Counter[tuple[int, BlockId]]:
        return Counter((place, block) for place, table in self.tables for block in table)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Reserve for all groups together, then allocate; a refusal changes nothing and is never wrong."""
        demand = [data.draw(st.integers(0, 6)) for _ in self.memory.pools]
        before = [(pool.total_blocks, pool.free_list()) for pool in self.memory.pools]
        cached = [pool.cached_hashes() for pool in self.memory.pools]
        possible = self.memory.can_take(demand)
        assert possible == self.possible(demand)
        if not self.memory.reserve(demand):
            assert not possible
            assert [(pool.total_blocks, pool.free_list()) for pool in self.memory.pools] == before
            assert [pool.cached_hashes() for pool in self.memory.pools] == cached
            return
        assert possible
        owned = self.owners()
        for place, (pool, count) in enumerate(zip(self.memory.pools, demand, strict=True)):
            assert pool.free_blocks >= count
            mine = [table for owner, table in self.tables if owner == place]
            table = data.draw(st.sampled_from(mine)) if mine and data.draw(st.booleans()) else []
            taken = pool.allocate(count, table)
            assert len(set(taken)) == count
            assert not any((place, block) in owned for block in taken), "a block with an owner is handed out"
            for block in taken:
                assert pool.hashes_of(block) == ()
                self.content[place].pop(block, None)
            self.tables.append((place, taken))

    def possible(self, demand: list[int]) -> bool:
        """Count from scratch: extents that hold an owned block are bound, all others can go to anyone."""
        layout, bound = self.memory.layout, [set[int]() for _ in self.memory.pools]
        owned = [set[BlockId]() for _ in self.memory.pools]
        if len(self.memory.pools) == 1:
            pool = self.memory.pools[0]
            return demand[0] <= pool.most_blocks - len({block for _, block in self.owners()})
        for place, block in self.owners():
            owned[place].add(block)
            bound[place].add((block - layout.null_granules) // layout.extent_granules)
        needed = 0
        for place, pool in enumerate(self.memory.pools):
            per_extent = layout.extent_granules // pool.layout.block_granules
            free = len(bound[place]) * per_extent - len(owned[place])
            needed += max(0, -(-(demand[place] - free) // per_extent))
        return needed <= layout.num_extents - sum(map(len, bound))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        place, table = data.draw(st.sampled_from(self.tables))
        pool = self.memory.pools[place]
        for block in table:
            known = sorted(pool.cached_hashes())
            name = data.draw(st.sampled_from(known)) if known and data.draw(st.booleans()) else self.fresh()
            if name not in pool.hashes_of(block):
                pool.publish(block, name, parent_hash=None, token_ids=[1])
                self.content[place].setdefault(block, set()).add(name)

    def fresh(self) -> bytes:
        self.names += 1
        return str(self.names).encode()

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.memory.pools) - 1))
        pool = self.memory.pools[place]
        names = sorted(pool.cached_hashes())
        if names:
            block = pool.find(data.draw(st.sampled_from(names)))
            assert block is not None
            idle = pool.idle([block])
            assert idle == ((place, block) not in self.owners())
            before = pool.free_blocks
            pool.touch([block])
            assert pool.free_blocks == before - idle
            self.tables.append((place, [block]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place, table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.memory.pools[place].free(table)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.memory.pools))
        names = sorted(pool.cached_hashes())
        if names and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(names))
            pool.forget(name)
            assert pool.find(name) is None
        else:
            pool.forget_idle()
            assert pool.idle_list() == []

    @invariant()
    def references_are_owners(self) -> None:
        owned = self.owners()
        ids: list[BlockId] = []
        for place, pool in enumerate(self.memory.pools):
            for block in pool.block_ids():
                assert pool.references(block) == owned[place, block]
            ids += pool.block_ids()
        assert set(owned) <= {(p, b) for p, pool in enumerate(self.memory.pools) for b in pool.block_ids()}
        assert len(ids) == len(set(ids)), "an id belongs to two groups"
        assert all(block >= self.memory.layout.null_granules for block in ids)

    @invariant()
    def free_and_used_and_cached_add_up(self) -> None:
        owned = self.owners()
        for place, pool in enumerate(self.memory.pools):
            live = {block for owner, block in owned if owner == place}
            idle, free = pool.idle_list(), pool.free_list()
            assert len(free) == len(set(free)) == pool.free_blocks == pool.plain_blocks + len(idle)
            assert set(free) | live == set(pool.block_ids())
            assert not set(free) & live
            assert pool.live_blocks == len(live)
            assert all(pool.hashes_of(block) for block in idle)
            assert not any(pool.hashes_of(block) for block in set(free) - set(idle))
            carried = [block for block in pool.block_ids() if pool.hashes_of(block)]
            assert pool.cached_blocks == len(carried)
            for block in carried:
                assert set(pool.hashes_of(block)) <= self.content[place][block]
            assert pool.cached_hashes() == {name for block in carried for name in pool.hashes_of(block)}

    @invariant()
    def an_extent_has_one_group_or_none(self) -> None:
        layout = self.memory.layout
        if len(self.memory.pools) == 1:
            return
        lent = [extent for place in range(len(self.memory.pools)) for extent in self.memory.extents_of(place)]
        assert len(lent) == len(set(lent)) == layout.num_extents - self.memory.unassigned_extents
        for place, pool in enumerate(self.memory.pools):
            homes = {(block - layout.null_granules) // layout.extent_granules for block in pool.block_ids()}
            ends = {
                (block + pool.layout.block_granules - 1 - layout.null_granules) // layout.extent_granules
                for block in pool.block_ids()
            }
            assert homes == ends == set(self.memory.extents_of(place))
        usage = self.memory.usage()
        assert min(usage.lost_bytes, usage.plain_bytes, usage.unassigned_bytes, usage.cached_bytes) >= 0

    @invariant()
    def replayed_events_are_what_can_be_hit(self) -> None:
        for place, pool in enumerate(self.memory.pools):
            for event in pool.take_events():
                match event:
                    case BlockStored():
                        assert event.block_hash not in self.replayed[place]
                        self.replayed[place].add(event.block_hash)
                    case BlockRemoved():
                        self.replayed[place].remove(event.block_hash)
                    case AllBlocksCleared():
                        self.replayed[place].clear()
            assert self.replayed[place] == pool.cached_hashes()
            assert {event.block_hash for event in pool.snapshot_events()} == pool.cached_hashes()


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestMemoryMachine = MemoryMachine.TestCase

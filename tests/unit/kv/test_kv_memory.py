import pytest

from headrace.base.errors import ConfigError, InvariantError
from headrace.base.ids import BlockId
from headrace.kv.budget import fixed_layout
from headrace.kv.memory import KvMemory
from headrace.types.cache_specs import FullAttentionSpec, KvLayout, LayerCache

SMALL = FullAttentionSpec(1, 8, 8, 2)  # 32 bytes a token
LARGE = FullAttentionSpec(4, 8, 8, 2)  # 128


def make(extents: int = 4, *, eviction: str = "lru", blocks: int = 4) -> KvMemory:
    """Two groups: an extent is one block of the second or ``blocks`` of the first."""
    caches = [LayerCache(0, SMALL), LayerCache(1, LARGE)]
    layout = fixed_layout(caches, block_tokens=[4, blocks], usable_blocks=[blocks, extents - 1])
    assert layout.extent_granules // layout.groups[0].block_granules == blocks
    assert layout.num_extents == extents
    return KvMemory(layout, eviction=eviction, record_events=True)


def cache(memory: KvMemory, place: int, name: str, blocks: int) -> list[BlockId]:
    """Allocate and publish blocks; the caller owns them."""
    need = [0, 0]
    need[place] = blocks
    assert memory.reserve(need)
    table = memory.pools[place].allocate(blocks)
    for index, block in enumerate(table):
        memory.pools[place].publish(block, f"{name}{index}".encode(), parent_hash=None, token_ids=[index])
    return table


def test_one_group_has_the_whole_memory_and_ids_from_one() -> None:
    memory = KvMemory(fixed_layout([LayerCache(0, SMALL)], block_tokens=4, usable_blocks=5))
    (pool,) = memory.pools
    assert (pool.total_blocks, pool.most_blocks, pool.block_ids()) == (5, 5, [1, 2, 3, 4, 5])
    assert memory.can_take([5])
    assert memory.can_take([3], [2])
    assert not memory.can_take([4], [2])
    assert memory.reserve([5])
    assert not memory.reserve([6])
    assert pool.allocate(3) == [1, 2, 3]
    assert memory.extents_of(0) == [0]


def test_extents_are_lent_when_needed_and_ids_are_offsets_in_granules() -> None:
    memory = make(3)
    small, large = memory.pools
    assert (small.total_blocks, large.total_blocks, memory.unassigned_extents) == (0, 0, 3)
    assert memory.reserve([2, 1])
    first, layout = memory.layout.null_granules, memory.layout
    assert small.allocate(2) == [first, first + 1]
    assert large.allocate(1) == [first + layout.extent_granules]
    assert (memory.extents_of(0), memory.extents_of(1), memory.unassigned_extents) == ([0], [1], 1)


def test_an_empty_extent_comes_back_at_once() -> None:
    memory = make(2)
    assert memory.reserve([5, 0])
    table = memory.pools[0].allocate(5)
    assert memory.unassigned_extents == 0
    memory.pools[0].free(table[4:])
    assert memory.unassigned_extents == 1
    assert memory.reserve([0, 1])
    memory.pools[0].free(table[:4])
    assert memory.unassigned_extents == 1


def test_all_or_nothing() -> None:
    memory = make(3)
    assert not memory.reserve([9, 1]), "three extents of four blocks, and one more"
    assert (memory.unassigned_extents, memory.pools[0].total_blocks) == (3, 0)
    assert memory.reserve([8, 1])


def test_a_group_takes_a_wholly_idle_extent_of_another_only_if_that_keeps_its_demand() -> None:
    memory = make(3)
    memory.pools[0].free(cache(memory, 0, "a", 8))
    assert memory.unassigned_extents == 1
    assert memory.can_take([4, 2])
    assert not memory.can_take([5, 2]), "an idle block is not counted for both"
    assert not memory.can_take([4, 2], [1, 0])
    assert memory.reserve([4, 2])
    assert (memory.pools[0].free_blocks, memory.pools[1].free_blocks) == (4, 2)
    assert memory.pools[0].evicted_blocks == 8, "four for the extent, four for its own demand"


def test_pinned_blocks_hold_their_extent() -> None:
    memory = make(2)
    table = cache(memory, 0, "a", 8)
    memory.pools[0].free(table)
    assert memory.can_take([2, 1])
    pins = [[table[0], table[7]], []]
    assert not memory.can_take([2, 1], pinned=pins), "each extent has a block of the hit"
    assert memory.can_take([2, 1], pinned=[[table[0], table[1]], []])
    memory.pools[0].touch(pins[0])
    assert not memory.reserve([0, 1])


def test_the_older_content_goes_whichever_group_has_it() -> None:
    memory = make(3)
    old = cache(memory, 1, "old", 1)
    new = cache(memory, 0, "new", 4)
    owned = cache(memory, 0, "own", 4)
    memory.pools[1].free(old)
    memory.pools[0].free(new)
    assert memory.reserve([1, 0])
    memory.pools[0].allocate(1)
    assert memory.pools[1].cached_hashes() == set(), "the other group's extent was idle for longer"
    assert memory.pools[0].find(b"new0") == new[0]
    memory.pools[0].free(owned)


def test_own_old_content_goes_before_newer_content_of_another() -> None:
    memory = make(2)
    own = cache(memory, 0, "own", 4)
    other = cache(memory, 1, "other", 1)
    memory.pools[0].free(own)
    memory.pools[1].free(other)
    assert memory.reserve([1, 0])
    memory.pools[0].allocate(1)
    assert memory.pools[1].find(b"other0") == other[0]
    assert memory.pools[0].find(b"own3") is None


def test_unassigned_extents_come_before_any_eviction() -> None:
    memory = make(3)
    memory.pools[0].free(cache(memory, 0, "a", 4))
    assert memory.reserve([4, 0])
    memory.pools[0].allocate(4)
    assert len(memory.pools[0].cached_hashes()) == 4


def test_new_blocks_come_from_the_fullest_extent_but_a_sequence_goes_on_in_its_own() -> None:
    memory = make(4)
    pool = memory.pools[0]
    assert memory.reserve([8, 0])
    first, second = pool.allocate(4), pool.allocate(4)
    pool.free(first[1:])
    pool.free(second[2:])
    assert pool.allocate(1) == second[2:3], "the fuller one"
    assert pool.allocate(1, first[:1]) == first[1:2], "beside the table's last block"


def test_eviction_prefers_the_nearly_empty_extent_among_the_oldest() -> None:
    memory = make(2)
    pool = memory.pools[0]
    table = cache(memory, 0, "a", 8)
    pool.free(table[3:4])
    pool.free(table[5:])
    assert memory.reserve([1, 0])
    taken = pool.allocate(1)
    assert taken[0] in table[5:], "three of four blocks of that extent are idle"


def test_several_extents_of_one_sequence_are_contiguous() -> None:
    memory = make(4)
    assert memory.reserve([12, 0])
    table = memory.pools[0].allocate(12)
    assert table == list(range(table[0], table[0] + 12))


def test_where_the_bytes_are() -> None:
    memory = make(4)
    table = cache(memory, 0, "a", 3)
    memory.pools[0].free(table[2:])
    usage = memory.usage()
    block = memory.layout.groups[0].block_bytes()
    assert (usage.live_bytes, usage.cached_bytes, usage.plain_bytes) == (2 * block, block, block)
    assert usage.group_live_bytes == [2 * block, 0]
    assert usage.unassigned_bytes == 3 * 4 * block
    assert usage.lost_bytes == memory.layout.null_granules * memory.layout.granule_bytes
    assert usage.total_bytes == memory.layout.total_bytes()


def test_what_a_sequence_holds_is_counted_in_granules() -> None:
    memory = make(4)
    assert memory.held_granules([[BlockId(0), BlockId(5), BlockId(6)], [BlockId(8)]]) == 2 * 1 + 1 * 4
    assert memory.total_granules == 4 * 4


def test_bad_layouts_and_policies_are_refused() -> None:
    with pytest.raises(InvariantError, match="at least one group"):
        KvMemory(KvLayout([], 16, 0, 0))
    groups = make().layout.groups
    with pytest.raises(InvariantError, match="without granules"):
        KvMemory(KvLayout(groups))
    with pytest.raises(InvariantError, match="larger than an extent"):
        KvMemory(KvLayout(groups, 128, 1, 9))
    with pytest.raises(ConfigError, match="--eviction"):
        make(eviction="random")

import pytest

from headrace.base.errors import InvariantError
from headrace.base.ids import NULL_BLOCK, GroupId
from headrace.kv.budget import fixed_layout
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.kv.memory import KvMemory
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import FullAttentionSpec, LayerCache

SPEC = FullAttentionSpec(kv_heads=1, key_dim=4, value_dim=4, dtype_bytes=2)


def make_pool(usable: int = 4, *, eviction: str = "lru", record_events: bool = True) -> BlockPool:
    layout = fixed_layout([LayerCache(0, SPEC)], block_tokens=4, usable_blocks=usable)
    return KvMemory(layout, eviction=eviction, record_events=record_events).pools[0]


def stored(name: bytes, parent: bytes | None = None, tokens: int = 1) -> BlockStored:
    return BlockStored(GroupId(0), "full", name, parent, [name[0]] * tokens, tokens)


def cached_table(pool: BlockPool, names: str) -> list[int]:
    """Allocate and publish one block for each letter."""
    table = pool.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        pool.publish(block, name.encode(), parent_hash=None, token_ids=[ord(name)])
    return table


def test_the_null_block_is_never_counted_handed_out_or_freed() -> None:
    pool = make_pool(4)
    assert (pool.total_blocks, pool.free_blocks) == (4, 4)
    assert NULL_BLOCK not in pool.allocate(4)
    pool.touch([NULL_BLOCK])
    pool.free([NULL_BLOCK])
    assert pool.references(NULL_BLOCK) == 0
    assert pool.idle([NULL_BLOCK]) == 0
    assert pool.free_blocks == 0


def test_freed_is_not_evicted() -> None:
    pool = make_pool()
    table = cached_table(pool, "ab")
    pool.free(table)
    assert pool.free_blocks == 4
    assert pool.find(b"a") == table[0]
    pool.touch(table[:1])
    assert pool.free_blocks == 3
    assert pool.references(table[0]) == 1


def test_the_tail_is_evicted_before_the_shared_beginning() -> None:
    pool = make_pool(3)
    table = cached_table(pool, "abc")
    pool.free(table)
    assert pool.idle_list() == [table[2], table[1], table[0]]
    pool.allocate(1)
    assert (pool.find(b"a"), pool.find(b"c")) == (table[0], None)
    assert pool.evicted_blocks == 1


def test_least_recently_used_goes_first() -> None:
    pool = make_pool(2)
    a, b = cached_table(pool, "ab")
    pool.free([a])
    pool.free([b])
    pool.touch([a])
    pool.free([a])
    assert pool.free_list() == [b, a]


def test_blocks_that_cache_nothing_are_used_before_cached_ones() -> None:
    pool = make_pool(3)
    cached = cached_table(pool, "a")
    plain = pool.allocate(2)
    pool.free(cached)
    pool.free(plain)
    assert pool.free_list()[-1] == cached[0]


def test_a_block_with_two_owners_survives_one() -> None:
    pool = make_pool()
    table = cached_table(pool, "a")
    pool.touch(table)
    pool.free(table)
    assert pool.references(table[0]) == 1
    assert pool.free_blocks == 3
    assert pool.idle(table) == 0


def test_freeing_without_an_owner_is_refused() -> None:
    pool = make_pool()
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(InvariantError, match="without an owner"):
        pool.free(table)


def test_more_than_free_is_refused() -> None:
    with pytest.raises(InvariantError, match="5 blocks asked for, 4 free"):
        make_pool(4).allocate(5)


def test_publishing_under_the_same_hash_twice_or_a_free_block_is_refused() -> None:
    pool = make_pool()
    table = cached_table(pool, "a")
    with pytest.raises(InvariantError, match="twice"):
        pool.publish(table[0], b"a", parent_hash=None, token_ids=[0])
    pool.free(table)
    pool.forget(b"a")
    with pytest.raises(InvariantError, match="without an owner"):
        pool.publish(table[0], b"a", parent_hash=None, token_ids=[0])


def test_a_block_carries_a_hash_for_each_unit_and_each_is_found_and_told() -> None:
    pool = make_pool(2)
    table = pool.allocate(1)
    pool.publish(table[0], b"a", parent_hash=None, token_ids=[97, 97])
    pool.publish(table[0], b"b", parent_hash=b"a", token_ids=[98, 98])
    assert pool.hashes_of(table[0]) == (b"a", b"b")
    assert (pool.find(b"a"), pool.find(b"b"), pool.cached_blocks) == (table[0], table[0], 1)
    pool.free(table)
    assert pool.take_events() == [stored(b"a", None, 2), stored(b"b", b"a", 2)]
    pool.allocate(2)
    assert pool.take_events() == [BlockRemoved(GroupId(0), b"a"), BlockRemoved(GroupId(0), b"b")]
    assert (pool.find(b"a"), pool.hashes_of(table[0]), pool.evicted_blocks) == (None, (), 1)


def test_forgetting_one_of_two_hashes_leaves_the_other() -> None:
    pool = make_pool(2)
    table = pool.allocate(1)
    pool.publish(table[0], b"a", parent_hash=None, token_ids=[97])
    pool.publish(table[0], b"b", parent_hash=b"a", token_ids=[98])
    pool.free(table)
    pool.forget(b"b")
    assert (pool.find(b"a"), pool.find(b"b"), pool.plain_blocks) == (table[0], None, 1)
    pool.forget(b"a")
    assert (pool.cached_blocks, pool.plain_blocks, pool.free_blocks) == (0, 2, 2)


def test_a_snapshot_builds_the_cached_set_from_nothing_parents_first() -> None:
    pool = make_pool(4)
    child, parent = pool.allocate(2)
    pool.publish(child, b"b", parent_hash=b"a", token_ids=[98])
    pool.publish(parent, b"a", parent_hash=None, token_ids=[97])
    gone = cached_table(pool, "c")
    pool.free(gone)
    pool.forget(b"c")
    assert pool.snapshot_events() == [stored(b"a"), stored(b"b", b"a")]


def test_one_hash_may_have_several_blocks_and_events_count_the_hash() -> None:
    pool = make_pool(2)
    first = cached_table(pool, "a")
    second = cached_table(pool, "a")
    pool.free(first)
    assert pool.find(b"a") == second[0], "the one in use, so that the free list keeps its length"
    pool.allocate(1)
    assert pool.find(b"a") == second[0]
    pool.free(second)
    pool.forget(b"a")
    assert pool.find(b"a") is None
    assert pool.take_events() == [BlockStored(GroupId(0), "full", b"a", None, [97], 1), BlockRemoved(GroupId(0), b"a")]
    assert pool.take_events() == []


def test_forgetting_idle_blocks_leaves_those_in_use() -> None:
    pool = make_pool(3)
    table = cached_table(pool, "ab")
    pool.free(table[1:])
    pool.take_events()
    pool.forget_idle()
    assert pool.cached_hashes() == {b"a"}
    assert pool.cached_blocks == 1
    assert pool.take_events() == [BlockRemoved(GroupId(0), b"b")]


def test_forgetting_everything_is_one_event() -> None:
    pool = make_pool(3)
    pool.free(cached_table(pool, "ab"))
    pool.take_events()
    pool.forget_idle()
    assert (pool.cached_hashes(), pool.cached_blocks, pool.free_blocks) == (set(), 0, 3)
    assert pool.take_events() == [AllBlocksCleared(GroupId(0))]


def test_without_a_taker_no_event_is_kept() -> None:
    pool = make_pool(2, record_events=False)
    cached_table(pool, "a")
    assert pool.take_events() == []

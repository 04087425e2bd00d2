import pytest

from headrace.base.errors import InvariantError
from headrace.base.ids import NULL_BLOCK, GroupId
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.kv.pool import BlockPool


def make_pool(usable: int = 4) -> BlockPool:
    return BlockPool(GroupId(0), usable + 1, record_events=True)


def cached_table(pool: BlockPool, names: str) -> list[int]:
    """Allocate and publish one block for each letter."""
    table = pool.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        pool.publish(block, name.encode(), None, [ord(name)])
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
    assert pool.free_list() == [table[2], table[1], table[0]]
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


def test_publishing_twice_or_a_free_block_is_refused() -> None:
    pool = make_pool()
    table = cached_table(pool, "a")
    with pytest.raises(InvariantError):
        pool.publish(table[0], b"z", None, [0])
    pool.free(table)
    pool.forget(b"a")
    with pytest.raises(InvariantError):
        pool.publish(table[0], b"a", None, [0])


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
    pool = BlockPool(GroupId(0), 3)
    cached_table(pool, "a")
    assert pool.take_events() == []


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(InvariantError):
        BlockPool(GroupId(0), 1)

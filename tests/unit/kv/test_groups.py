import pytest

from headrace.base.errors import InvariantError
from headrace.kv.groups import CacheGroup, FullGroup, make_group
from headrace.kv.prefix_hash import block_hashes
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout


def make_full(block_tokens: int = 4, usable: int = 8, hash_tokens: int | None = None) -> FullGroup:
    layout = GroupLayout(0, FullAttentionSpec(1, 4, 4, 2), [0], block_tokens, usable + 1)
    group = make_group(layout, hash_tokens=hash_tokens or block_tokens, record_events=False)
    assert isinstance(group, FullGroup)
    return group


def test_a_full_group_fulfils_the_contract() -> None:
    group: CacheGroup = make_full()
    assert group.keeps_all
    assert group.reachable(3, 16)


@pytest.mark.parametrize(
    ("table_blocks", "tokens", "needed"), [(0, 1, 1), (0, 4, 1), (0, 5, 2), (1, 4, 0), (1, 5, 1), (3, 5, 0), (0, 0, 0)]
)
def test_blocks_needed_rounds_up(table_blocks: int, tokens: int, needed: int) -> None:
    assert make_full().blocks_needed(table_blocks, tokens) == needed


def test_the_hit_goes_left_to_right_until_the_first_miss() -> None:
    group = make_full()
    hashes = block_hashes(list(range(16)), 4)
    table: list[int] = []
    group.allocate(table, 4)
    for place in (0, 1, 3):
        group.pool.publish(table[place], hashes[place], None, [])
    assert group.longest_hit(hashes, 16) == table[:2]
    assert group.longest_hit(hashes, 7) == table[:1], "whole blocks below the cap"
    assert group.longest_hit(hashes[:1], 16) == table[:1]
    assert group.longest_hit([], 16) == []


def test_a_block_of_several_hash_units_carries_the_last_one() -> None:
    # kv.md section 15: block 256, unit 4 gives hash indices 63, 127.
    group = make_full(block_tokens=256, hash_tokens=4)
    hashes = [bytes([index]) for index in range(128)]
    assert [group.block_hash(hashes, 0), group.block_hash(hashes, 1)] == [bytes([63]), bytes([127])]
    with pytest.raises(InvariantError):
        make_full(block_tokens=6, hash_tokens=4)


def test_allocation_grows_the_table_at_its_end() -> None:
    group = make_full()
    table: list[int] = []
    first = group.allocate(table, 2)
    second = group.allocate(table, 1)
    assert table == first + second


def test_nothing_is_freed_behind() -> None:
    group = make_full()
    table: list[int] = []
    group.allocate(table, 2)
    assert group.free_behind(table, 8) == 0
    assert group.pool.free_blocks == 6


@pytest.mark.parametrize(
    ("tables", "shared"),
    [([], 0), ([[1, 2, 3]], 3), ([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2, 3]], 2), ([[1], [2]], 0)],
)
def test_common_prefix(tables: list[list[int]], shared: int) -> None:
    assert make_full().common_prefix(tables) == shared

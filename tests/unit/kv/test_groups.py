import pytest
from group_cases import filled, hash_of, hashes, make
from kv_oracle import STATE, Spec, chunked, full, layout_of, sliding

from headrace.base.errors import InvariantError
from headrace.kv.groups import GroupHit, make_group
from headrace.kv.memory import KvMemory
from headrace.types.cache_specs import (
    CompressedSpec,
    CrossAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    LatentSpec,
    NoCacheSpec,
    SharedSpec,
)

LATENT = LatentSpec(64)
CROSS = CrossAttentionSpec(1, 4, 4, 2)
EVERY_TOKEN = [full(), LATENT, CompressedSpec(64, 1), IndexKeysSpec(16)]


@pytest.mark.parametrize("spec", [NoCacheSpec(), SharedSpec(0)])
def test_kinds_without_memory_have_no_group(spec: NoCacheSpec | SharedSpec) -> None:
    with pytest.raises(InvariantError):
        make_group(GroupLayout(0, spec, [0], 4, 2), KvMemory(layout_of((full(), 4, 2))).pools[0], hash_tokens=4)


@pytest.mark.parametrize(
    ("spec", "block_tokens"), [(full(), 6), (full(), 0), (CompressedSpec(64, 3), 8), (IndexKeysSpec(16, 3), 8)]
)
def test_blocks_that_do_not_fit_are_refused(spec: Spec, block_tokens: int) -> None:
    layout = GroupLayout(0, spec, [0], block_tokens, 2)
    with pytest.raises(InvariantError):
        make_group(layout, KvMemory(layout_of((full(), 4, 2))).pools[0], hash_tokens=4)


@pytest.mark.parametrize("spec", [sliding(0), chunked(0)])
def test_empty_windows_are_refused(spec: Spec) -> None:
    with pytest.raises(InvariantError):
        make_group(GroupLayout(0, spec, [0], 4, 2), KvMemory(layout_of((full(), 4, 2))).pools[0], hash_tokens=4)


@pytest.mark.parametrize("spec", [*EVERY_TOKEN, sliding(3), chunked(8)])
@pytest.mark.parametrize(
    ("table_blocks", "tokens", "needed"), [(0, 1, 1), (0, 4, 1), (0, 5, 2), (1, 4, 0), (1, 5, 1), (3, 5, 0), (0, 0, 0)]
)
def test_blocks_needed_rounds_up(spec: Spec, table_blocks: int, tokens: int, needed: int) -> None:
    assert make(spec).blocks_needed(table_blocks, tokens) == needed


@pytest.mark.parametrize("spec", EVERY_TOKEN)
def test_the_hit_goes_left_to_right_until_the_first_miss(spec: Spec) -> None:
    group = make(spec)
    table = filled(group, 4, 16, without=(2,))
    known = hashes(4, 16)
    assert group.longest_hit(known, 16) == GroupHit(8, table[:2])
    assert group.longest_hit(known, 8) == GroupHit(8, table[:2])
    assert group.longest_hit(known, 4) == GroupHit(4, table[:1])
    assert group.longest_hit(known, 0) == GroupHit(0, [])
    assert group.keeps_all
    assert group.skippable(100) == 0
    assert group.free_behind(table, 0, 16) == 0
    assert group.free_at(0) > 1 << 50
    assert group.reachable(3, 13, 4)
    assert not group.reachable(3, 12, 4)


@pytest.mark.parametrize("spec", EVERY_TOKEN)
def test_a_hit_may_end_inside_a_block(spec: Spec) -> None:
    group = make(spec, block_tokens=8, hash_tokens=2)
    table = filled(group, 2, 14)
    known = hashes(2, 20)
    assert group.longest_hit(known, 20) == GroupHit(14, table[:1], table[1])
    assert group.longest_hit(known, 12) == GroupHit(12, table[:1], table[1])
    assert group.longest_hit(known, 10) == GroupHit(10, table[:1], table[1])
    assert group.longest_hit(known, 8) == GroupHit(8, table[:1])
    assert group.longest_hit(known, 6) == GroupHit(6, [], table[0]), "the whole block lies there, but not all is ours"


@pytest.mark.parametrize("spec", EVERY_TOKEN)
def test_a_longer_hit_is_cut_without_looking_again(spec: Spec) -> None:
    group = make(spec, block_tokens=8, hash_tokens=2)
    table = filled(group, 2, 22)
    longer = group.longest_hit(hashes(2, 22), 22)
    assert longer == GroupHit(22, table[:2], table[2])
    for tokens in range(2, 24, 2):
        assert group.longest_hit([], tokens, longer) == group.longest_hit(hashes(2, 22), min(tokens, 22))


def test_a_compressed_hit_needs_only_finished_records() -> None:
    # Blocks of 16 tokens hold two records of 8; the hash unit is 2.
    group = make(CompressedSpec(64, 8), block_tokens=16, hash_tokens=2)
    table = filled(group, 2, 26)
    known = hashes(2, 40)
    assert group.longest_hit(known, 40) == GroupHit(30, table[:1], table[1]), "26 tokens make one record, so do 30"
    assert group.longest_hit(known, 28) == GroupHit(28, table[:1], table[1])
    assert group.longest_hit(known, 24) == GroupHit(24, table[:1], table[1])
    assert group.longest_hit(known, 22) == GroupHit(22, table[:1]), "no record of the second block is read"
    assert group.longest_hit(known, 14) == GroupHit(14, [], table[0])
    assert group.longest_hit(known, 6) == GroupHit(6, [])
    longer = group.longest_hit(known, 40)
    for tokens in (28, 24, 22, 16, 14, 6):
        assert group.longest_hit([], tokens, longer) == group.longest_hit(known, tokens)


def test_an_empty_compressed_group_offers_what_needs_no_record() -> None:
    group = make(CompressedSpec(64, 8), block_tokens=16, hash_tokens=2)
    assert group.longest_hit(hashes(2, 40), 40) == GroupHit(6, [])
    assert group.longest_hit(hashes(2, 40), 4) == GroupHit(4, [])
    group = make(IndexKeysSpec(16, 8), block_tokens=16, hash_tokens=8)
    assert group.longest_hit(hashes(8, 40), 40) == GroupHit(0, [])


def test_a_block_that_is_in_use_is_preferred() -> None:
    group = make(full())
    idle, used = filled(group, 4, 4), filled(group, 4, 4)
    group.pool.free(idle)
    assert group.longest_hit(hashes(4, 4), 4).table == used


@pytest.mark.parametrize("spec", [*EVERY_TOKEN, sliding(3), chunked(8), CROSS])
def test_allocation_grows_the_table_at_its_end(spec: Spec) -> None:
    group = make(spec)
    table: list[int] = []
    first = group.allocate(table, 2)
    assert table == first + group.allocate(table, 1)


@pytest.mark.parametrize("spec", [*EVERY_TOKEN, sliding(3), chunked(8)])
@pytest.mark.parametrize(
    ("tables", "shared"),
    [
        ([], 0),
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2], [1, 2, 3]], 2),
        ([[1], [2]], 0),
        ([[1, 2, 3], [1, 4, 3]], 1),
    ],
)
def test_common_prefix(spec: Spec, tables: list[list[int]], shared: int) -> None:
    assert make(spec).common_prefix(tables) == shared


def test_a_recurrent_hit_is_the_last_checkpoint() -> None:
    group = make(STATE, block_tokens=0, hash_tokens=4)
    first, second, working = group.pool.allocate(3)
    group.pool.publish(first, hash_of(8), parent_hash=None, token_ids=[])
    group.pool.publish(second, hash_of(24), parent_hash=None, token_ids=[])
    known = hashes(4, 40)
    assert group.longest_hit(known, 40) == GroupHit(24, [], second)
    assert group.longest_hit(known, 24) == GroupHit(24, [], second)
    # Vector of kv.md 7: trimming to 512 loses the only entry, asking again finds the state at 256.
    assert group.longest_hit(known, 20, GroupHit(24, [], second)) == GroupHit(8, [], first)
    assert group.longest_hit(known, 8) == GroupHit(8, [], first)
    assert group.longest_hit(known, 4) == GroupHit(0, [])
    assert working not in (first, second)


def test_a_recurrent_table_is_one_state() -> None:
    group = make(STATE, block_tokens=0, hash_tokens=4)
    assert [group.blocks_needed(blocks, 1000) for blocks in (0, 1)] == [1, 0]
    table: list[int] = []
    assert group.allocate(table, 1) == table
    assert group.keeps_all
    assert group.skippable(1000) == 0
    assert group.free_behind(table, 0, 1000) == 0
    assert group.free_at(0) > 1 << 50
    assert not group.reachable(0, 1000, 4)
    assert group.common_prefix([table, table]) == 0


def test_a_cross_table_is_the_encoder_output() -> None:
    group = make(CROSS)
    assert [group.blocks_needed(0, 1000, tokens) for tokens in (0, 1, 4, 9)] == [0, 1, 1, 3]
    assert group.blocks_needed(3, 1, 9) == 0
    assert group.blocks_needed(5, 1, 9) == 0
    assert group.longest_hit([], 12) == GroupHit(12, [])
    assert group.keeps_all
    assert group.skippable(1000) == 0
    assert group.free_behind([1, 2], 0, 1000) == 0
    assert group.free_at(0) > 1 << 50
    assert not group.reachable(0, 1000, 4)
    assert group.common_prefix([[1], [1]]) == 0
    with pytest.raises(InvariantError):
        make_group(GroupLayout(0, CROSS, [0], 0, 2), KvMemory(layout_of((full(), 4, 2))).pools[0], hash_tokens=4)

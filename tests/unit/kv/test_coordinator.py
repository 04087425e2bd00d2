import pytest

from headrace.base.errors import InvariantError
from headrace.kv.coordinator import KvCoordinator, SequenceKv
from headrace.kv.events import BlockStored
from headrace.kv.prefix_hash import block_hashes
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout, KvLayout

TOKENS = list(range(100, 140))


def make_kv(*groups: tuple[int, int], caching: bool = True) -> KvCoordinator:
    """Return a coordinator; a group is (tokens in a block, usable blocks)."""
    layout = KvLayout(
        [
            GroupLayout(index, FullAttentionSpec(index + 1, 4, 4, 2), [index], block_tokens, usable + 1)
            for index, (block_tokens, usable) in enumerate(groups)
        ]
    )
    return KvCoordinator(layout, enable_prefix_caching=caching, record_events=True)


def computed(kv: KvCoordinator, token_ids: list[int], tokens: int, salt: str | None = None) -> SequenceKv:
    """Start a sequence without a hit and publish its first ``tokens`` tokens."""
    sequence = kv.new_sequence(salt=salt)
    kv.start(sequence, kv.no_hit(), tokens)
    kv.advance(sequence, token_ids, tokens)
    return sequence


def free_of(kv: KvCoordinator) -> list[int]:
    return [group.pool.free_blocks for group in kv.groups]


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    kv = make_kv((4, 8))
    computed(kv, TOKENS[:12], 12)
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS[:9]).tokens == 8
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS[:8]).tokens == 4, (
        "whole blocks only: no shared block is written"
    )
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS[:1]).tokens == 0


def test_hits_are_found_after_the_owner_is_gone() -> None:
    kv = make_kv((4, 8))
    first = computed(kv, TOKENS, 12)
    tables = [list(table) for table in first.tables]
    kv.release(first)
    assert free_of(kv) == [8]
    hit = kv.find_hit(kv.new_sequence(salt=None), TOKENS)
    assert (hit.tokens, hit.tables) == (12, tables)


def test_salts_do_not_meet() -> None:
    kv = make_kv((4, 8))
    computed(kv, TOKENS, 12, salt="a")
    assert kv.find_hit(kv.new_sequence(salt="b"), TOKENS).tokens == 0
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS).tokens == 0
    assert kv.find_hit(kv.new_sequence(salt="a"), TOKENS).tokens == 12


def test_only_computed_tokens_are_published() -> None:
    kv = make_kv((4, 8))
    sequence = kv.new_sequence(salt=None)
    kv.start(sequence, kv.no_hit(), 12)
    kv.advance(sequence, TOKENS, 7)
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS).tokens == 4
    assert sequence.advance_at_tokens == 8
    kv.advance(sequence, TOKENS, 8)
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS).tokens == 8


def test_without_caching_nothing_is_hashed_or_found() -> None:
    kv = make_kv((4, 8), caching=False)
    sequence = kv.new_sequence(salt=None)
    kv.start(sequence, kv.no_hit(), 8)
    assert sequence.advance_at_tokens > 1 << 40
    kv.advance(sequence, TOKENS, 8)
    assert sequence.hashes == []
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS).tokens == 0


def test_hashes_of_the_front_end_are_continued() -> None:
    kv = make_kv((4, 8))
    sequence = kv.new_sequence(salt=None, hashes=block_hashes(TOKENS[:8], 4))
    kv.find_hit(sequence, TOKENS[:20])
    assert sequence.hashes == block_hashes(TOKENS[:20], 4)


def test_groups_agree_on_the_shortest_hit() -> None:
    kv = make_kv((4, 8), (4, 8))
    first = computed(kv, TOKENS, 16)
    kv.release(first)
    # Evict the tail of group 1 alone, as pressure on one group does.
    kv.groups[1].pool.allocate(6)
    hit = kv.find_hit(kv.new_sequence(salt=None), TOKENS)
    assert hit.tokens == 8
    assert [len(table) for table in hit.tables] == [2, 2]


def test_hits_end_at_a_block_edge_of_every_group() -> None:
    kv = make_kv((2, 16), (4, 8))
    assert kv.hash_tokens == 2
    computed(kv, TOKENS, 10)
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS[:12]).tokens == 8
    kv = make_kv((4, 16), (6, 16))
    computed(kv, TOKENS, 30)
    hit = kv.find_hit(kv.new_sequence(salt=None), TOKENS)
    assert hit.tokens == 24
    assert [len(table) for table in hit.tables] == [6, 4]


def test_the_fixed_point_needs_more_than_one_pass() -> None:
    kv = make_kv((4, 16), (6, 16))
    first = computed(kv, TOKENS, 36)
    kv.release(first)
    kv.groups[1].pool.allocate(16 - 3)  # leaves the blocks of 18 tokens in group 1
    hit = kv.find_hit(kv.new_sequence(salt=None), TOKENS)
    assert hit.tokens == 12
    assert [len(table) for table in hit.tables] == [3, 2]


def test_idle_hit_blocks_count_as_demand() -> None:
    kv = make_kv((4, 4))
    kv.release(computed(kv, TOKENS, 12))
    hit = kv.find_hit(kv.new_sequence(salt=None), TOKENS[:20])
    assert hit.tokens == 12
    assert kv.has_free(kv.demand_blocks(hit, 16), [0])
    assert not kv.has_free(kv.demand_blocks(hit, 16), [1])
    assert not kv.has_free(kv.demand_blocks(hit, 20), [0]), "3 idle hits and 2 new blocks of 4"


def test_hits_are_pinned_before_anything_is_handed_out() -> None:
    kv = make_kv((4, 4))
    kv.release(computed(kv, TOKENS, 12))
    sequence = kv.new_sequence(salt=None)
    hit = kv.find_hit(sequence, TOKENS[:16])
    kv.start(sequence, hit, 16)
    assert sequence.tables[0][:3] == hit.tables[0]
    assert len(set(sequence.tables[0])) == 4
    assert free_of(kv) == [0]


def test_growth_is_all_or_nothing_over_the_groups() -> None:
    kv = make_kv((4, 8), (4, 3))
    sequence = kv.new_sequence(salt=None)
    kv.start(sequence, kv.no_hit(), 8)
    assert kv.grow(sequence, 20) is None
    assert free_of(kv) == [6, 1]
    assert sequence.covered_tokens == 8
    added = kv.grow(sequence, 9)
    assert added is not None
    assert [len(blocks) for blocks in added] == [1, 1]
    assert sequence.covered_tokens == 12
    assert kv.missing_blocks(sequence, 20) == [2, 2]


def test_release_gives_everything_back_and_can_start_again() -> None:
    kv = make_kv((4, 8))
    sequence = computed(kv, TOKENS, 16)
    kv.release(sequence)
    assert (free_of(kv), sequence.tables, sequence.covered_tokens) == ([8], [[]], 0)
    hit = kv.find_hit(sequence, TOKENS[:17])
    kv.start(sequence, hit, 17)
    assert hit.tokens == 16
    assert sequence.advance_at_tokens == 20
    with pytest.raises(InvariantError):
        kv.start(sequence, kv.no_hit(), 4)


def test_a_broken_sequence_is_forgotten_with_its_shared_beginning() -> None:
    kv = make_kv((4, 8))
    healthy = computed(kv, TOKENS[:8], 8)
    broken = computed(kv, TOKENS, 12)
    kv.forget(broken)
    assert kv.find_hit(kv.new_sequence(salt=None), TOKENS).tokens == 0
    kv.release(broken)
    kv.release(healthy)
    assert free_of(kv) == [8]


def test_events_name_the_parent_and_the_tokens() -> None:
    kv = make_kv((4, 8))
    computed(kv, TOKENS, 8)
    hashes = block_hashes(TOKENS[:8], 4)
    assert kv.take_events() == [
        BlockStored(0, "full", hashes[0], None, TOKENS[:4], 4),
        BlockStored(0, "full", hashes[1], hashes[0], TOKENS[4:8], 4),
    ]


def test_a_layout_without_groups_is_refused() -> None:
    with pytest.raises(InvariantError):
        KvCoordinator(KvLayout([]), enable_prefix_caching=True)

import pytest
from coordinator_cases import TOKENS, computed, find, free_of, full_kv, held, make_kv, new
from kv_oracle import STATE, chunked, full, sliding

from headrace.base.errors import ConfigError, InvariantError
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.groups import GroupHit
from headrace.kv.prefix_hash import HashExtras, block_hashes, root_of
from headrace.types.cache_specs import CrossAttentionSpec, KvLayout
from headrace.types.requests import MediaSpan

CROSS = CrossAttentionSpec(1, 4, 4, 2)


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    kv = full_kv((4, 8))
    computed(kv, TOKENS, 12)
    assert find(kv, TOKENS[:9]).tokens == 8
    assert find(kv, TOKENS[:8]).tokens == 4, "the hash unit is the block, so no shared block is written"
    assert find(kv, TOKENS[:1]).tokens == 0


def test_hits_are_found_after_the_owner_is_gone() -> None:
    kv = full_kv((4, 8))
    first = computed(kv, TOKENS, 12)
    table = list(first.tables[0])
    kv.release(first)
    assert free_of(kv) == [8]
    hit = find(kv, TOKENS)
    assert (hit.tokens, hit.parts) == (12, [GroupHit(12, table)])


def test_salts_do_not_meet() -> None:
    kv = full_kv((4, 8))
    computed(kv, TOKENS, 12, salt="a")
    assert find(kv, TOKENS, "b").tokens == 0
    assert find(kv, TOKENS).tokens == 0
    assert find(kv, TOKENS, "a").tokens == 12


def test_only_computed_tokens_are_published() -> None:
    kv = full_kv((4, 8))
    sequence = new(kv)
    kv.start(sequence, kv.no_hit(), 12)
    assert sequence.advance_at_tokens == 4
    kv.advance(sequence, TOKENS, 7)
    assert find(kv, TOKENS).tokens == 4
    assert sequence.advance_at_tokens == 8
    kv.advance(sequence, TOKENS, 8)
    assert find(kv, TOKENS).tokens == 8


def test_without_caching_nothing_is_hashed_or_found() -> None:
    kv = make_kv((full(), 4, 8), (sliding(5), 4, 8), caching=False)
    sequence = new(kv)
    kv.start(sequence, kv.no_hit(), 8)
    assert sequence.advance_at_tokens == 8, "where the window leaves the first block"
    kv.advance(sequence, TOKENS, 8)
    assert sequence.hashes == []
    assert find(kv, TOKENS).tokens == 0
    assert kv.group_hits(sequence, TOKENS) == kv.no_hit().parts
    assert held(sequence.tables[1]) == 1
    full_only = full_kv((4, 8), caching=False)
    sequence = new(full_only)
    full_only.start(sequence, full_only.no_hit(), 8)
    assert sequence.advance_at_tokens > 1 << 50


def test_hashes_of_the_front_end_are_continued() -> None:
    kv = full_kv((4, 8), hash_seed="shared")
    sequence = new(kv, hashes=block_hashes(TOKENS[:8], 4, root=root_of("shared")))
    kv.find_hit(sequence, TOKENS[:20])
    assert sequence.hashes == block_hashes(TOKENS[:20], 4, root=root_of("shared"))


def test_the_hash_unit_divides_every_block() -> None:
    assert make_kv((full(), 12, 4), (sliding(5), 8, 4), (STATE, 0, 2)).hash_tokens == 4
    assert make_kv((STATE, 0, 2)).hash_tokens == 16
    assert make_kv((full(), 8, 4), hash_tokens=2).hash_tokens == 2
    with pytest.raises(ConfigError, match="--prefix-hash-tokens 8 does not divide"):
        make_kv((full(), 12, 4), hash_tokens=8)


def test_groups_agree_on_the_shortest_hit() -> None:
    kv = full_kv((4, 8), (4, 8))
    kv.release(computed(kv, TOKENS, 16))
    # Evict the tail of group 1 alone, as pressure on one group does.
    for unit in (2, 3):
        kv.memory.pools[1].forget(block_hashes(TOKENS, 4)[unit])
    hit = find(kv, TOKENS)
    assert hit.tokens == 8
    assert [len(part.table) for part in hit.parts] == [2, 2]


def test_the_fixed_point_asks_again_and_never_trims() -> None:
    # The window at 16 is whole, but the full group has 12 tokens only: the window at 12 needs another block.
    kv = make_kv((full(), 4, 8), (sliding(5), 4, 8))
    sequence = computed(kv, TOKENS, 16)
    table = list(sequence.tables[1])
    assert table[:3] == [0, 0, 0], "the window at 16 keeps one block"
    hashes = block_hashes(TOKENS, 4)
    kv.memory.pools[0].forget(hashes[3])
    hit = find(kv, TOKENS)
    assert (hit.tokens, held(hit.parts[1].table)) == (12, 1)
    assert hit.parts[1].table[:2] == [0, 0]
    assert kv.memory.pools[1].hashes_of(hit.parts[1].table[2]) == (hashes[2],)
    kv.memory.pools[1].forget(hashes[2])
    assert find(kv, TOKENS).tokens == 8


def test_the_fixed_point_needs_more_than_one_pass() -> None:
    # A chunk of 10 tokens makes the chunked group shorter in the second pass, after the window has shortened the hit.
    kv = make_kv((full(), 2, 40), (chunked(10), 2, 40), (sliding(4), 2, 40))
    kv.release(computed(kv, TOKENS, 40))
    hashes = block_hashes(TOKENS, 2)
    kv.memory.pools[2].forget(hashes[16])  # windows at 33..36
    kv.memory.pools[2].forget(hashes[17])
    kv.memory.pools[2].forget(hashes[18])
    kv.memory.pools[1].forget(hashes[15])  # chunk from 30 on
    assert find(kv, TOKENS[:39]).tokens == 30


def test_idle_hit_blocks_count_as_demand() -> None:
    kv = full_kv((4, 4))
    kv.release(computed(kv, TOKENS, 12))
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:20])
    assert hit.tokens == 12
    assert kv.demand_blocks(hit, 16, sequence) == [4]
    assert kv.has_free([4])
    assert kv.has_free([4], [0], hit)
    assert not kv.has_free([4], [1], hit)
    assert kv.demand_blocks(hit, 20, sequence) == [5], "3 idle hits and 2 new blocks of 4"


def test_blocks_in_use_are_no_demand() -> None:
    kv = full_kv((4, 6))
    computed(kv, TOKENS, 12)
    sequence = new(kv)
    assert kv.demand_blocks(kv.find_hit(sequence, TOKENS[:20]), 20, sequence) == [2]


def test_windows_need_no_more_than_window_and_batch() -> None:
    kv = make_kv((full(), 4, 400), (sliding(9), 4, 400), (chunked(8), 4, 400), batch_tokens=16, steps_in_flight=2)
    sequence = new(kv, prompt_tokens=1000)
    demand = kv.demand_blocks(kv.no_hit(), 1000, sequence)
    assert demand == [250, (8 + 32) // 4 + 1, -(-(7 + 32) // 4)]
    kv.start(sequence, kv.no_hit(), 16)
    assert kv.missing_blocks(sequence, 1000) == [246, 11 - 4, 10 - 4]
    ahead = new(kv, prompt_tokens=1000)
    kv.start(ahead, kv.no_hit(), 48)
    assert kv.missing_blocks(ahead, 1000) == [238, 0, 0], "more than it should ever hold"
    kv.release(ahead)
    tokens, most = list(range(1000)), [0, 0, 0]
    for planned in range(32, 1001, 16):
        assert kv.grow(sequence, planned) is not None
        most = [max(one, held(table)) for one, table in zip(most, sequence.tables, strict=True)]
        kv.advance(sequence, tokens, planned - 16)
    assert most[0] == 248
    assert most[1] <= demand[1]
    assert most[2] <= demand[2]
    assert kv.missing_blocks(sequence, 1000) == [2, 2, 2]


def test_hits_are_pinned_before_anything_is_handed_out() -> None:
    kv = full_kv((4, 4))
    kv.release(computed(kv, TOKENS, 12))
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:16])
    assert kv.start(sequence, hit, 16) == []
    assert sequence.tables[0][:3] == hit.parts[0].table
    assert len(set(sequence.tables[0])) == 4
    assert free_of(kv) == [0]


def test_hits_of_all_groups_are_pinned_before_the_first_group_allocates() -> None:
    # Both groups live in one memory; group 0 could have its blocks only by taking the idle hit of group 1.
    kv = full_kv((4, 4), (4, 4))
    kv.release(computed(kv, TOKENS, 12))
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:16])
    assert hit.tokens == 12
    tables = [list(part.table) for part in hit.parts]
    kv.start(sequence, hit, 16)
    assert [table[:3] for table in sequence.tables] == tables
    assert all(
        pool.references(block) == 1 for pool, table in zip(kv.memory.pools, tables, strict=True) for block in table
    )


def test_growth_is_all_or_nothing_over_the_groups() -> None:
    kv = full_kv((4, 8), (4, 3))
    sequence = new(kv)
    kv.start(sequence, kv.no_hit(), 8)
    before = [list(table) for table in sequence.tables]
    assert kv.grow(sequence, 80) is None
    assert sequence.tables == before
    assert sequence.covered_tokens == 8
    added = kv.grow(sequence, 9)
    assert added is not None
    assert [len(blocks) for blocks in added] == [1, 1]
    assert sequence.covered_tokens == 12
    assert kv.missing_blocks(sequence, 20) == [2, 2]
    assert kv.grow(sequence, 12) == [[], []]


def test_release_gives_everything_back_and_can_start_again() -> None:
    kv = full_kv((4, 8))
    sequence = computed(kv, TOKENS, 16)
    kv.release(sequence)
    assert (free_of(kv), sequence.tables, sequence.covered_tokens) == ([8], [[]], 0)
    assert sequence.advance_at_tokens > 1 << 50
    assert sequence.save_at_tokens > 1 << 50
    hit = kv.find_hit(sequence, TOKENS[:17])
    kv.start(sequence, hit, 17)
    assert hit.tokens == 16
    assert sequence.advance_at_tokens == 20
    with pytest.raises(InvariantError):
        kv.start(sequence, kv.no_hit(), 4)


def test_a_hit_without_room_is_a_fault_of_the_caller() -> None:
    kv = full_kv((4, 4))
    with pytest.raises(InvariantError, match="not free"):
        kv.start(new(kv), kv.no_hit(), 17)


def test_a_broken_sequence_is_forgotten_with_its_shared_beginning() -> None:
    kv = full_kv((4, 8))
    healthy = computed(kv, TOKENS, 8)
    broken = computed(kv, TOKENS, 12)
    kv.forget(broken)
    assert find(kv, TOKENS).tokens == 0
    kv.release(broken)
    kv.release(healthy)
    assert free_of(kv) == [8]


def test_forgetting_what_is_idle_keeps_what_is_in_use() -> None:
    kv = full_kv((4, 8), (4, 8))
    computed(kv, TOKENS, 8)
    kv.release(computed(kv, TOKENS, 16))
    kv.forget_idle()
    assert find(kv, TOKENS).tokens == 8


def test_blocks_that_fell_behind_can_still_be_hit() -> None:
    kv = make_kv((full(), 4, 12), (sliding(5), 4, 12), (chunked(8), 4, 12))
    sequence = computed(kv, TOKENS, 20)
    assert [held(table) for table in sequence.tables] == [5, 1, 1]
    assert sequence.first_blocks == [0, 4, 4]
    for tokens in range(20, 4, -4):
        hit = find(kv, TOKENS[: tokens + 1])
        assert hit.tokens == tokens
        assert [held(part.table) for part in hit.parts] == [tokens // 4, 1, tokens % 8 // 4]


def test_the_window_of_a_hit_is_what_its_sequence_starts_with() -> None:
    kv = make_kv((full(), 4, 12), (sliding(5), 4, 12))
    kv.release(computed(kv, TOKENS, 20))
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:21])
    assert kv.demand_blocks(hit, 21, sequence) == [6, 2], (
        "every hit block and the window's one are idle, and a new one each"
    )
    kv.start(sequence, hit, 21)
    assert sequence.first_blocks == [0, 4]
    assert sequence.tables[1][:4] == [0, 0, 0, 0]
    assert all(sequence.tables[1][4:])
    assert sequence.advance_at_tokens == 24
    kv.advance(sequence, TOKENS, 24)
    assert sequence.tables[1][:5] == [0, 0, 0, 0, 0]


def test_a_window_that_was_hit_is_not_published_for_other_lengths() -> None:
    kv = make_kv((full(), 4, 12), (sliding(5), 4, 12))
    kv.release(computed(kv, TOKENS, 16))
    hashes = block_hashes(TOKENS, 4)
    for unit in range(3):
        kv.memory.pools[1].forget(hashes[unit])
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:20])
    assert hit.tokens == 16
    kv.start(sequence, hit, 20)
    kv.advance(sequence, TOKENS, 20)
    assert find(kv, TOKENS[:13]).tokens == 0, "nobody has the window at 12"
    assert find(kv, TOKENS[:30]).tokens == 20


def test_an_encoder_output_has_blocks_of_its_own_and_never_limits() -> None:
    kv = make_kv((full(), 4, 8), (CROSS, 4, 8))
    extras = HashExtras(media=(MediaSpan("sound", 0, 0, 9),))
    sequence = kv.new_sequence(extras=extras, prompt_tokens=12, encoder_tokens=9)
    assert kv.demand_blocks(kv.no_hit(), 12, sequence) == [3, 3]
    kv.start(sequence, kv.no_hit(), 8)
    assert [len(table) for table in sequence.tables] == [2, 3]
    assert sequence.covered_tokens == 8
    assert kv.missing_blocks(sequence, 12) == [1, 0]
    kv.advance(sequence, TOKENS, 8)
    again = kv.new_sequence(extras=extras, prompt_tokens=12, encoder_tokens=9)
    hit = kv.find_hit(again, TOKENS)
    assert hit.tokens == 8
    kv.start(again, hit, 12)
    assert not set(again.tables[1]) & set(sequence.tables[1])
    other = kv.new_sequence(extras=HashExtras(media=(MediaSpan("noise", 0, 0, 9),)), prompt_tokens=12, encoder_tokens=9)
    assert kv.find_hit(other, TOKENS).tokens == 0, "the decoder's KV depends on what it hears"


def test_an_encoder_input_without_a_name_is_not_cached() -> None:
    kv = make_kv((full(), 4, 8), (CROSS, 4, 8))
    sequence = kv.new_sequence(prompt_tokens=12, encoder_tokens=9)
    kv.start(sequence, kv.no_hit(), 8)
    kv.advance(sequence, TOKENS, 8)
    assert sequence.advance_at_tokens > 1 << 50
    for encoder_tokens in (0, 9):
        other = kv.new_sequence(prompt_tokens=12, encoder_tokens=encoder_tokens)
        assert kv.find_hit(other, TOKENS).tokens == 0


def test_a_watched_hash_is_noticed() -> None:
    kv = full_kv((4, 8))
    hashes = block_hashes(TOKENS, 4)
    kv.watch(hashes[1:3])
    sequence = new(kv)
    kv.start(sequence, kv.no_hit(), 8)
    kv.advance(sequence, TOKENS, 4)
    assert not kv.watched_published
    kv.advance(sequence, TOKENS, 8)
    assert kv.watched_published
    kv.watch(hashes)
    assert not kv.watched_published
    kv.watch([])
    kv.grow(sequence, 12)
    kv.advance(sequence, TOKENS, 12)
    assert not kv.watched_published


def test_common_prefixes_are_counted_per_group() -> None:
    kv = make_kv((full(), 4, 12), (sliding(5), 4, 12), (STATE, 0, 4), checkpoint_tokens=4)
    first = computed(kv, TOKENS, 12)
    second = new(kv)
    kv.start(second, kv.find_hit(second, TOKENS[:10]), 10)
    assert kv.common_prefix([first, second]) == [2, 1, 0]


def test_a_sequence_alone_starts_again_in_empty_memory() -> None:
    kv = full_kv((4, 8), (4, 8))
    sequence = computed(kv, TOKENS, 16)
    kv.restart_alone(sequence)
    assert sequence.alone
    assert sequence.tables == [[], []]
    assert find(kv, TOKENS).tokens == 0
    assert kv.memory.unassigned_extents == kv.memory.layout.num_extents
    kv.start(sequence, kv.find_hit(sequence, TOKENS[:16]), 16)
    kv.advance(sequence, TOKENS, 16)
    assert find(kv, TOKENS).tokens == 0


def test_drafts_beside_a_recurrent_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="rolled back"):
        make_kv((full(), 4, 8), (STATE, 0, 2), draft_tokens=1)
    make_kv((full(), 4, 8), (sliding(5), 4, 8), draft_tokens=1)


def test_a_layout_without_groups_is_refused() -> None:
    with pytest.raises(InvariantError):
        KvCoordinator(KvLayout([], 256, 0, 0), enable_prefix_caching=True, batch_tokens=1)


def test_what_was_computed_over_a_broken_prefix_is_not_found_again() -> None:
    kv = full_kv((4, 40))
    broken = computed(kv, TOKENS, 16)
    follower = new(kv)
    kv.start(follower, kv.find_hit(follower, TOKENS[:40]), 32)
    ended = computed(kv, TOKENS, 24)
    kv.release(ended)
    kv.forget(broken, [broken, follower])
    kv.release(broken)
    kv.advance(follower, TOKENS, 32)
    kv.release(follower)
    assert find(kv, TOKENS[:40]).tokens == 0
    kv.release(computed(kv, TOKENS, 16))
    assert find(kv, TOKENS[:40]).tokens == 16, "the prefix is computed anew, its old continuations stay gone"


def test_a_failure_costs_no_other_beginning() -> None:
    kv = full_kv((4, 40))
    kv.release(computed(kv, TOKENS[1:], 16))
    broken = computed(kv, TOKENS, 16)
    kv.forget(broken, [broken])
    assert find(kv, TOKENS[1:]).tokens == 16

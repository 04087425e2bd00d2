"""Hits that end inside a block: copied, taken over without a copy, or taken over at a loss."""

import pytest
from coordinator_cases import TOKENS, computed, find, free_of, held, make_kv, new
from kv_oracle import STATE, full, sliding

from headrace.kv.prefix_hash import block_hashes
from headrace.types.cache_specs import CompressedSpec
from headrace.types.plans import BlockCopy

OTHER = [*TOKENS[:6], 7, 8, 9, 10, 11, 12]


def test_a_tail_in_use_is_copied_and_both_go_on() -> None:
    kv = make_kv((full(), 8, 6), hash_tokens=2)
    owner = computed(kv, TOKENS, 11)
    assert kv.memory.pools[0].hashes_of(owner.tables[0][1]) == tuple(block_hashes(TOKENS[:10], 2)[4:])
    guest = new(kv)
    hit = kv.find_hit(guest, TOKENS[:11])
    assert (hit.tokens, hit.parts[0].table, hit.parts[0].tail) == (10, owner.tables[0][:1], owner.tables[0][1])
    assert kv.demand_blocks(hit, 11, guest) == [1]
    copies = kv.start(guest, hit, 11)
    assert copies == [BlockCopy(0, owner.tables[0][1], guest.tables[0][1])]
    assert guest.tables[0][0] == owner.tables[0][0]
    assert guest.tables[0][1] != owner.tables[0][1]
    assert kv.memory.pools[0].references(owner.tables[0][1]) == 1
    assert guest.covered_tokens == 16
    assert guest.advance_at_tokens == 12
    kv.advance(owner, TOKENS, 12)
    kv.advance(guest, [*TOKENS[:10], 1, 2], 12)
    assert find(kv, TOKENS[:13]).parts[0].tail == owner.tables[0][1]
    assert find(kv, [*TOKENS[:10], 1, 2, 3]).parts[0].tail == guest.tables[0][1]


def test_a_tail_that_ends_there_and_is_idle_is_taken_over() -> None:
    kv = make_kv((full(), 8, 4), hash_tokens=2)
    owner = computed(kv, TOKENS, 10)
    tail = owner.tables[0][1]
    kv.release(owner)
    guest, tokens = new(kv), [*TOKENS[:10], 1, 2, 3, 4]
    hit = kv.find_hit(guest, tokens)
    assert kv.demand_blocks(hit, 14, guest) == [2], "one idle block that is shared, one for the tail"
    assert kv.start(guest, hit, 14) == []
    assert guest.tables[0][1] == tail
    kv.advance(guest, tokens, 12)
    assert kv.memory.pools[0].hashes_of(tail)[-1] == block_hashes(tokens[:12], 2)[-1]
    assert find(kv, TOKENS[:16]).tokens == 10, "what it took over stays as it was"


def test_a_tail_with_more_behind_it_is_copied_although_idle() -> None:
    kv = make_kv((full(), 8, 4), hash_tokens=2)
    kv.release(computed(kv, TOKENS, 14))
    guest = new(kv)
    hit = kv.find_hit(guest, OTHER)
    assert hit.tokens == 6
    copies = kv.start(guest, hit, 12)
    assert [copy.source for copy in copies] == [hit.parts[0].tail]
    assert copies[0].target == guest.tables[0][0]
    assert find(kv, TOKENS[:15]).tokens == 14


def test_without_another_block_what_lies_behind_is_lost() -> None:
    kv = make_kv((full(), 8, 2), hash_tokens=2)
    owner = computed(kv, TOKENS, 14)
    kv.release(owner)
    guest = new(kv)
    hit = kv.find_hit(guest, OTHER)
    assert kv.demand_blocks(hit, 12, guest) == [2]
    assert kv.has_free([2], [0], hit)
    assert kv.start(guest, hit, 12) == []
    assert guest.tables[0][0] == hit.parts[0].tail
    assert kv.memory.pools[0].hashes_of(guest.tables[0][0]) == tuple(block_hashes(OTHER[:6], 2))
    assert find(kv, TOKENS[:15]).tokens == 6
    assert free_of(kv) == [0]


def test_what_is_computed_again_is_published_again() -> None:
    kv = make_kv((full(), 8, 2), hash_tokens=2)
    kv.release(computed(kv, TOKENS, 14))
    guest = new(kv)
    hit = kv.find_hit(guest, TOKENS[:14])
    assert hit.tokens == 12, "a token must be left to compute"
    assert kv.start(guest, hit, 14) == []
    hashes = tuple(block_hashes(TOKENS[:14], 2))
    assert kv.memory.pools[0].hashes_of(guest.tables[0][1]) == hashes[4:6]
    kv.advance(guest, TOKENS[:14], 14)
    assert kv.memory.pools[0].hashes_of(guest.tables[0][1]) == hashes[4:]


def test_a_block_that_began_as_a_copy_gives_up_the_right_hashes() -> None:
    kv = make_kv((full(), 8, 2), hash_tokens=2)
    first = computed(kv, TOKENS, 3)
    copied = new(kv)
    kv.start(copied, kv.find_hit(copied, TOKENS[:4]), 8)
    assert copied.tables[0] != first.tables[0]
    kv.advance(copied, TOKENS, 8)
    hashes = block_hashes(TOKENS[:8], 2)
    pool, block = kv.memory.pools[0], copied.tables[0][0]
    assert pool.hashes_of(block) == tuple(hashes[1:]), "the first unit was copied, not computed"
    kv.release(copied)
    third = new(kv)
    hit = kv.find_hit(third, [*TOKENS[:4], 1, 2])
    assert (hit.tokens, hit.parts[0].tail) == (4, block)
    assert kv.start(third, hit, 6) == [], "the other block is in use"
    assert pool.hashes_of(block) == (hashes[1],)


def test_the_source_may_be_handed_out_in_the_same_plan() -> None:
    kv = make_kv((full(), 8, 3), hash_tokens=2)
    kv.release(computed(kv, TOKENS, 8))
    guest = new(kv)
    copies = kv.start(guest, kv.find_hit(guest, OTHER[:7]), 7)
    assert len(copies) == 1
    assert kv.memory.pools[0].references(copies[0].source) == 0
    stranger = new(kv)
    kv.start(stranger, kv.no_hit(), 16)
    assert copies[0].source in stranger.tables[0]


def test_every_group_copies_its_own_tail() -> None:
    kv = make_kv((full(), 8, 8), (sliding(3), 4, 8), (full(2), 2, 20))
    owner = computed(kv, TOKENS, 10)
    guest = new(kv)
    hit = kv.find_hit(guest, TOKENS[:11])
    assert hit.tokens == 10
    assert [part.tail for part in hit.parts] == [owner.tables[0][1], owner.tables[1][2], None]
    copies = kv.start(guest, hit, 11)
    assert copies == [
        BlockCopy(0, owner.tables[0][1], guest.tables[0][1]),
        BlockCopy(1, owner.tables[1][2], guest.tables[1][2]),
    ]
    assert guest.tables[1][:2] == [0, 0]
    assert [len(table) for table in guest.tables] == [2, 3, 6]
    assert guest.tables[2][:5] == owner.tables[2]


def test_a_compressed_block_without_a_finished_record_is_not_copied() -> None:
    kv = make_kv((CompressedSpec(64, 8), 16, 8), (sliding(8), 4, 20))
    kv.release(computed(kv, TOKENS, 24))
    guest = new(kv)
    hit = kv.find_hit(guest, TOKENS[:22])
    assert (hit.tokens, hit.parts[0].tail) == (20, None)
    assert kv.start(guest, hit, 22) == []
    assert [held(table) for table in guest.tables] == [2, 3]


@pytest.mark.parametrize("states", [1, 2])
def test_a_checkpoint_is_copied_or_with_one_state_used_up(states: int) -> None:
    kv = make_kv((STATE, 0, states), hash_tokens=4)
    pool = kv.memory.pools[0]
    [checkpoint] = pool.allocate(1)
    pool.publish(checkpoint, block_hashes(TOKENS[:4], 4)[0], parent_hash=None, token_ids=TOKENS[:4])
    pool.free([checkpoint])
    guest = new(kv)
    hit = kv.find_hit(guest, TOKENS[:6])
    assert (hit.tokens, hit.parts[0].tail) == (4, checkpoint)
    assert kv.demand_blocks(hit, 6, guest) == [1]
    copies = kv.start(guest, hit, 6)
    if states == 2:
        assert copies == [BlockCopy(0, checkpoint, guest.tables[0][0])]
        assert find(kv, TOKENS[:6]).tokens == 4
    else:
        assert copies == []
        assert guest.tables[0] == [checkpoint]
        assert pool.hashes_of(checkpoint) == ()
        assert find(kv, TOKENS[:6]).tokens == 0

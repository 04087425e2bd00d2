"""Ranges that come from outside: what is allocated for them, what is published, and what if they do not come."""

import pytest
from coordinator_cases import TOKENS, computed, find, held, make_kv, new
from kv_oracle import STATE, chunked, full, sliding

from headrace.base.errors import InvariantError
from headrace.kv.groups import GroupHit
from headrace.kv.sequence import Hit
from headrace.types.plans import BlockCopy


def test_what_arrives_is_published_then_and_not_before() -> None:
    kv = make_kv((full(), 4, 12))
    sequence = new(kv)
    kv.find_hit(sequence, TOKENS[:22])
    assert kv.demand_blocks(kv.no_hit(), 22, sequence, external_tokens=16) == [6]
    assert kv.start(sequence, kv.no_hit(), 16, external_tokens=16) == []
    assert len(sequence.tables[0]) == 4
    assert find(kv, TOKENS).tokens == 0
    with pytest.raises(InvariantError, match="still arriving"):
        kv.advance(sequence, TOKENS, 16)
    kv.watch(sequence.hashes)
    kv.external_done(sequence, TOKENS[:22], 16)
    assert kv.watched_published
    assert find(kv, TOKENS).tokens == 16
    assert sequence.advance_at_tokens == 20
    kv.grow(sequence, 22)
    kv.advance(sequence, TOKENS[:22], 22)
    assert find(kv, TOKENS).tokens == 20


def test_only_the_valid_beginning_is_published() -> None:
    kv = make_kv((full(), 4, 12))
    sequence = new(kv)
    kv.find_hit(sequence, TOKENS[:22])
    kv.start(sequence, kv.no_hit(), 16, external_tokens=16)
    kv.external_done(sequence, TOKENS[:22], 8)
    kv.release(sequence)
    assert find(kv, TOKENS).tokens == 8


@pytest.mark.parametrize("valid", [0, 3])
def test_nothing_valid_publishes_nothing(valid: int) -> None:
    kv = make_kv((full(), 4, 12))
    sequence = new(kv)
    kv.find_hit(sequence, TOKENS[:22])
    kv.start(sequence, kv.no_hit(), 16, external_tokens=16)
    kv.external_done(sequence, TOKENS[:22], valid)
    kv.release(sequence)
    assert find(kv, TOKENS).tokens == 0


def test_more_than_was_asked_for_cannot_arrive() -> None:
    kv = make_kv((full(), 4, 12))
    sequence = new(kv)
    kv.start(sequence, kv.no_hit(), 16)
    with pytest.raises(InvariantError, match="have arrived"):
        kv.external_done(sequence, TOKENS, 16)
    kv.release(sequence)
    kv.start(sequence, kv.no_hit(), 16, external_tokens=8)
    with pytest.raises(InvariantError, match="have arrived"):
        kv.external_done(sequence, TOKENS, 12)


def test_windows_get_blocks_for_the_end_of_the_range_only() -> None:
    kv = make_kv((full(), 4, 30), (sliding(6), 4, 30), (chunked(16), 4, 30))
    kv.release(computed(kv, TOKENS, 8))
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:45])
    assert hit.tokens == 8
    assert [held(part.table) for part in hit.parts] == [2, 2, 2]
    assert kv.demand_blocks(hit, 44, sequence, external_tokens=32)[0] == 11
    kv.start(sequence, hit, 40, external_tokens=32)
    assert [held(table) for table in sequence.tables] == [10, 2, 2], "35 to 40, and 32 to 40"
    assert [len(table) for table in sequence.tables] == [10, 10, 10]
    assert sequence.first_blocks == [0, 8, 8]
    assert kv.memory.pools[1].references(hit.parts[1].table[1]) == 0, "a window before the end is not even pinned"
    kv.external_done(sequence, TOKENS[:45], 40)
    assert find(kv, TOKENS[:45]).tokens == 40
    assert find(kv, TOKENS[:39]).tokens == 8
    kv.grow(sequence, 45)
    kv.advance(sequence, TOKENS[:45], 45)
    assert [held(table) for table in sequence.tables] == [12, 2, 4]


def test_a_window_that_begins_in_the_hit_goes_on_in_its_blocks() -> None:
    kv = make_kv((full(), 4, 30), (sliding(20), 4, 30))
    owner = computed(kv, TOKENS, 12)
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:25])
    kv.start(sequence, hit, 24, external_tokens=12)
    assert sequence.tables[1][0] == 0, "24 - 19 = 5: the first block is not read"
    assert sequence.tables[1][1:3] == owner.tables[1][1:3]
    assert all(sequence.tables[1][3:])


def test_the_state_arrives_at_the_end_of_the_range() -> None:
    kv = make_kv((full(), 4, 30), (STATE, 0, 6), checkpoint_tokens=4)
    computed(kv, TOKENS, 8)
    sequence = new(kv, 30)
    hit = kv.find_hit(sequence, TOKENS[:30])
    assert (hit.tokens, hit.parts[1].tail is None) == (8, False)
    assert kv.start(sequence, hit, 16, external_tokens=8) == [], "the checkpoint at 8 is of no use at 16"
    assert len(sequence.tables[1]) == 1
    kv.external_done(sequence, TOKENS[:30], 16)
    assert find(kv, TOKENS[:30]).tokens == 8, "a working state is never published"
    assert find(kv, TOKENS[:30]).shared_boundary_tokens == 16
    assert kv.next_stop(sequence, 16, 30) == 20
    assert sequence.save_at_tokens == 20


def test_states_may_be_behind_only_if_they_arrive() -> None:
    # kv.md 7: attention has 16 tokens, the state 8.
    kv = make_kv((full(), 4, 30), (STATE, 0, 6), checkpoint_tokens=8)
    owner = computed(kv, TOKENS, 8)
    kv.grow(owner, 15)
    kv.advance(owner, TOKENS, 15)
    sequence = new(kv, 30)
    parts = kv.group_hits(sequence, TOKENS[:30])
    assert [part.tokens for part in parts] == [12, 8]
    diverged = Hit(12, parts)
    with pytest.raises(InvariantError, match="has 8 tokens of a hit of 12"):
        kv.start(sequence, diverged, 16)
    assert kv.start(sequence, diverged, 20, external_tokens=8) == []
    assert sequence.tables[0][:3] == owner.tables[0][:3]
    kv.external_done(sequence, TOKENS[:30], 20)
    assert sequence.advance_at_tokens == 24


def test_groups_that_keep_all_may_not_be_behind() -> None:
    kv = make_kv((full(), 4, 30), (full(2), 4, 30))
    owner = computed(kv, TOKENS, 8)
    hit = Hit(8, [GroupHit(8, owner.tables[0][:2]), GroupHit(4, owner.tables[1][:1])])
    sequence = new(kv)
    for external_tokens in (0, 8):
        with pytest.raises(InvariantError, match="has 4 tokens of a hit of 8"):
            kv.start(sequence, hit, 16, external_tokens=external_tokens)


def test_a_load_does_not_go_on_in_a_copied_block() -> None:
    kv = make_kv((full(), 8, 12), hash_tokens=4)
    computed(kv, TOKENS, 12)
    sequence = new(kv)
    hit = kv.find_hit(sequence, TOKENS[:30])
    with pytest.raises(InvariantError, match="tail"):
        kv.start(sequence, hit, 24, external_tokens=12)
    [part] = hit.parts
    cut = Hit(8, [GroupHit(8, part.table)])
    assert kv.start(sequence, cut, 24, external_tokens=16) == []
    other = new(kv)
    assert kv.start(other, hit, 13) == [BlockCopy(0, part.tail, other.tables[0][1])]


def test_group_hits_are_independent() -> None:
    kv = make_kv((full(), 4, 30), (sliding(3), 4, 30))
    computed(kv, TOKENS, 16)
    sequence = new(kv)
    kv.find_hit(sequence, TOKENS[:20])
    kv.memory.pools[0].forget(sequence.hashes[1])
    assert [part.tokens for part in kv.group_hits(sequence, TOKENS[:20])] == [4, 16]
    assert find(kv, TOKENS[:20]).tokens == 4


def test_release_ends_an_arrival() -> None:
    kv = make_kv((full(), 4, 12))
    sequence = new(kv)
    kv.start(sequence, kv.no_hit(), 16, external_tokens=16)
    kv.release(sequence)
    kv.start(sequence, kv.no_hit(), 16)
    kv.advance(sequence, TOKENS, 16)
    assert find(kv, TOKENS).tokens == 16

"""Recurrent states: where checkpoints are made, from when on they can be hit, and what undoes them."""

import pytest
from coordinator_cases import TOKENS, computed, find, free_of, make_kv, new
from kv_oracle import STATE, chunked, full

from headrace.kv.coordinator import KvCoordinator
from headrace.kv.prefix_hash import block_hashes
from headrace.types.plans import BlockCopy

NEVER = 1 << 50


def hybrid(*, block_tokens: int = 4, states: int = 6, checkpoint_tokens: int = 0, **options: object) -> KvCoordinator:
    return make_kv((full(), block_tokens, 40), (STATE, 0, states), checkpoint_tokens=checkpoint_tokens, **options)


def stops(kv: KvCoordinator, prompt_tokens: int, batch_tokens: int, start: int = 0) -> list[int]:
    """Return where the chunks of a prompt end."""
    sequence, ends = new(kv, prompt_tokens), []
    while start < prompt_tokens:
        start = kv.next_stop(sequence, start, min(prompt_tokens, start + batch_tokens))
        ends.append(start)
    return ends


def test_chunks_stop_at_the_last_boundary_of_the_prompt() -> None:
    # kv.md 3: hash unit 32, prompt 10000, budget 8192: the last boundary is 9984. (Stops at block edges are not needed:
    # the working state is not kept by place.)
    kv = hybrid(block_tokens=32)
    assert stops(kv, 10000, 8192) == [8192, 9984, 10000]
    assert stops(kv, 10000, 8192, start=9984) == [10000]
    assert stops(kv, 64, 100) == [32, 64], "a token must be left to compute"
    assert stops(kv, 65, 100) == [64, 65]
    assert stops(kv, 33, 100) == [32, 33]
    assert stops(kv, 32, 100) == [32]
    assert stops(kv, 5, 100) == [5]


def test_chunks_stop_every_so_many_tokens() -> None:
    kv = hybrid(block_tokens=32, checkpoint_tokens=512)
    assert stops(kv, 1300, 384) == [384, 512, 896, 1024, 1280, 1300]
    assert stops(kv, 1300, 8192) == [512, 1024, 1280, 1300]
    assert stops(hybrid(block_tokens=32, checkpoint_tokens=500), 1300, 8192) == [512, 1024, 1280, 1300]
    assert stops(hybrid(block_tokens=32, checkpoint_tokens=4096), 10000, 8192) == [4096, 8192, 9984, 10000]


def test_without_states_or_caching_nothing_stops() -> None:
    for kv in (make_kv((full(), 4, 8)), make_kv((full(), 4, 8), (STATE, 0, 2), caching=False)):
        sequence = new(kv, 20)
        assert kv.next_stop(sequence, 0, 20) == 20
        kv.start(sequence, kv.no_hit(), 20)
        assert sequence.save_at_tokens > NEVER
        assert kv.plan_saves(sequence, 16) == []


def test_a_checkpoint_can_be_hit_once_its_step_is_applied_and_not_before() -> None:
    kv = hybrid()
    sequence = new(kv, 11)
    kv.start(sequence, kv.no_hit(), 8)
    assert sequence.save_at_tokens == 8
    copies = kv.plan_saves(sequence, 8)
    assert copies == [BlockCopy(1, sequence.tables[1][0], copies[0].target)]
    assert copies[0].target != sequence.tables[1][0]
    assert sequence.save_at_tokens > NEVER
    assert find(kv, TOKENS[:11]).tokens == 0
    kv.watch(block_hashes(TOKENS[:8], 4)[1:])
    kv.advance(sequence, TOKENS, 7)
    assert find(kv, TOKENS[:11]).tokens == 0
    kv.advance(sequence, TOKENS, 8)
    assert kv.watched_published
    guest = new(kv, 11)
    hit = kv.find_hit(guest, TOKENS[:11])
    assert (hit.tokens, hit.parts[1].tail) == (8, copies[0].target)
    assert kv.start(guest, hit, 11) == [BlockCopy(1, copies[0].target, guest.tables[1][0])]
    assert guest.tables[1] != sequence.tables[1]
    assert kv.memory.pools[1].references(copies[0].target) == 0


def test_a_row_that_ends_elsewhere_saves_nothing() -> None:
    kv = hybrid(checkpoint_tokens=8)
    sequence = new(kv, 30)
    kv.start(sequence, kv.no_hit(), 30)
    assert kv.plan_saves(sequence, 6) == []
    assert sequence.save_at_tokens == 8
    assert kv.plan_saves(sequence, 9) == [], "it went past the boundary"
    assert sequence.save_at_tokens == 16
    assert len(kv.plan_saves(sequence, 16)) == 1
    assert sequence.save_at_tokens == 24
    assert len(kv.plan_saves(sequence, 24)) == 1
    assert sequence.save_at_tokens == 28
    assert len(kv.plan_saves(sequence, 28)) == 1
    assert sequence.save_at_tokens == 32


def test_all_states_are_saved_together_or_none() -> None:
    kv = make_kv((full(), 4, 8), (STATE, 0, 1), checkpoint_tokens=4)
    sequence = new(kv, 40)
    kv.start(sequence, kv.no_hit(), 4)
    taken = []
    while kv.memory.reserve([0, 1]):
        taken += kv.memory.pools[1].allocate(1)
    before = free_of(kv)
    assert kv.plan_saves(sequence, 4) == [], "no block is free: nobody waits or is preempted for a checkpoint"
    assert sequence.save_at_tokens == 8
    assert free_of(kv) == before
    kv.memory.pools[1].free(taken[:1])
    assert len(kv.plan_saves(sequence, 8)) == 1


def test_what_is_cached_is_not_saved_again() -> None:
    kv = hybrid(checkpoint_tokens=4)
    computed(kv, TOKENS, 4)
    sequence = new(kv, 40)
    kv.find_hit(sequence, TOKENS[:40])
    kv.start(sequence, kv.no_hit(), 8)
    assert kv.plan_saves(sequence, 4) == []
    assert len(kv.plan_saves(sequence, 8)) == 1


def test_the_slower_of_two_equal_saves_is_dropped() -> None:
    kv = hybrid(checkpoint_tokens=4)
    both = [new(kv, 40), new(kv, 40)]
    for sequence in both:
        kv.start(sequence, kv.no_hit(), 4)
        assert len(kv.plan_saves(sequence, 4)) == 1
    free = kv.memory.pools[1].free_blocks
    for sequence in both:
        kv.advance(sequence, TOKENS, 4)
    assert kv.memory.pools[1].free_blocks == free + 2
    assert kv.memory.pools[1].cached_blocks == 1


def test_saves_of_two_steps_in_flight_are_applied_in_order() -> None:
    kv = hybrid(checkpoint_tokens=4)
    sequence = new(kv, 40)
    kv.start(sequence, kv.no_hit(), 12)
    targets = [kv.plan_saves(sequence, end)[0].target for end in (4, 8)]
    kv.advance(sequence, TOKENS, 4)
    assert find(kv, TOKENS[:40]).parts[1].tail == targets[0]
    kv.advance(sequence, TOKENS, 8)
    assert find(kv, TOKENS[:40]).parts[1].tail == targets[1]


def test_checkpoints_in_the_making_give_way() -> None:
    kv = hybrid(checkpoint_tokens=4)
    sequence = new(kv, 40)
    kv.start(sequence, kv.no_hit(), 12)
    free = free_of(kv)
    kv.plan_saves(sequence, 4)
    kv.plan_saves(sequence, 8)
    assert free_of(kv) != free
    assert kv.drop_saves([sequence])
    assert free_of(kv) == free
    assert not kv.drop_saves([sequence])
    kv.advance(sequence, TOKENS, 8)
    assert find(kv, TOKENS[:40]).tokens == 0, "what was given up is never found"


@pytest.mark.parametrize("end", ["release", "forget"])
def test_pending_saves_end_with_their_sequence(end: str) -> None:
    kv = hybrid(checkpoint_tokens=4)
    sequence = new(kv, 40)
    kv.start(sequence, kv.no_hit(), 4)
    kv.plan_saves(sequence, 4)
    if end == "forget":
        kv.forget(sequence)
    kv.release(sequence)
    assert sequence.saves == []
    assert all(pool.live_blocks == 0 for pool in kv.memory.pools)
    # It resumes while the old plan is in flight; that plan's result says nothing about its new blocks.
    kv.start(sequence, kv.find_hit(sequence, TOKENS[:40]), 4)
    kv.advance(sequence, TOKENS, 4)
    assert find(kv, TOKENS[:40]).tokens == 0, "attention is there, the state is not"
    assert find(kv, TOKENS[:40]).shared_boundary_tokens == 4


def test_a_broken_sequence_takes_its_checkpoints_along() -> None:
    kv = hybrid(checkpoint_tokens=4)
    sequence = computed(kv, TOKENS, 12)
    assert find(kv, TOKENS).tokens == 12
    kv.forget(sequence)
    assert all(not pool.cached_hashes() for pool in kv.memory.pools)


def test_a_shared_beginning_gets_a_checkpoint_from_the_second_sequence() -> None:
    kv = hybrid()
    computed(kv, TOKENS, 20, prompt_tokens=20)
    second = new(kv, 30)
    tokens = TOKENS[:11] + [1] * 19
    hit = kv.find_hit(second, tokens)
    assert (hit.tokens, hit.shared_boundary_tokens) == (0, 8)
    assert kv.next_stop(second, 0, 30) == 8
    kv.start(second, hit, 8)
    assert second.save_at_tokens == 8
    assert len(kv.plan_saves(second, 8)) == 1
    assert second.save_at_tokens == 28
    kv.advance(second, tokens, 8)
    third = TOKENS[:10] + [2] * 5
    assert find(kv, third).tokens == 8
    assert find(kv, third).shared_boundary_tokens == 0


def test_a_boundary_that_needs_no_block_is_not_a_shared_beginning() -> None:
    kv = make_kv((chunked(8), 4, 8), (STATE, 0, 4), checkpoint_tokens=0)
    hit = find(kv, TOKENS[:20])
    assert (hit.tokens, hit.shared_boundary_tokens) == (0, 0)
    computed(kv, TOKENS, 20, prompt_tokens=18)
    assert find(kv, [*TOKENS[:12], 1]).shared_boundary_tokens == 12


def test_a_state_limits_the_hit_of_all() -> None:
    kv = hybrid(checkpoint_tokens=8)
    sequence = computed(kv, TOKENS, 30)
    for tokens, hit_tokens in ((30, 24), (24, 16), (25, 24), (9, 8), (8, 0)):
        hit = find(kv, TOKENS[:tokens])
        assert hit.tokens == hit_tokens
        assert len(hit.parts[0].table) == hit_tokens // 4
    kv.release(sequence)
    assert find(kv, TOKENS[:30]).tokens == 24


def test_a_checkpoint_of_a_decode_is_hashed_when_its_token_is_known() -> None:
    kv = hybrid(checkpoint_tokens=8)
    sequence = new(kv, 6)
    kv.start(sequence, kv.no_hit(), 6)
    kv.plan_saves(sequence, 4)
    kv.advance(sequence, TOKENS[:6], 6)
    for end in (7, 8):
        kv.grow(sequence, end)
        kv.plan_saves(sequence, end)
    assert [save.tokens for save in sequence.saves] == [8]
    kv.advance(sequence, TOKENS[:7], 7)
    kv.advance(sequence, TOKENS[:9], 8)
    assert find(kv, TOKENS[:10]).tokens == 8

"""Cache events: each unit of each kind describes itself, and a snapshot says the same as the stream."""

import pytest
from coordinator_cases import TOKENS, computed, find, full_kv, make_kv, new
from kv_oracle import STATE, chunked, full, layout_of, sliding

from headrace.base.errors import InvariantError
from headrace.base.ids import GroupId
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, parents_first, window_tokens_of
from headrace.kv.prefix_hash import ExtraKey, ExtraKind, HashExtras, block_hashes
from headrace.types.requests import MediaSpan


def test_events_name_the_parent_and_the_tokens() -> None:
    kv = full_kv((4, 8))
    computed(kv, TOKENS, 8)
    hashes = block_hashes(TOKENS[:8], 4)
    assert kv.take_events() == [
        BlockStored(GroupId(0), "full", hashes[0], None, TOKENS[:4], 4),
        BlockStored(GroupId(0), "full", hashes[1], hashes[0], TOKENS[4:8], 4),
    ]
    assert kv.take_events() == []


def test_one_event_is_one_hash_unit_also_of_an_incomplete_block() -> None:
    # kv.md 15: unit 4, boundary 28 inside the block [16, 32): units [4, 7), the parent of the first is unit 3.
    kv = make_kv((full(), 16, 4), hash_tokens=4)
    computed(kv, TOKENS, 30)
    hashes = block_hashes(TOKENS[:28], 4)
    events = kv.take_events()
    assert [event.block_hash for event in events if isinstance(event, BlockStored)] == hashes
    last = events[4:]
    assert [event.parent_hash for event in last if isinstance(event, BlockStored)] == hashes[3:6]
    assert [event.token_ids for event in last if isinstance(event, BlockStored)] == [
        TOKENS[start : start + 4] for start in (16, 20, 24)
    ]
    assert {event.block_tokens for event in last if isinstance(event, BlockStored)} == {4}


def test_kinds_and_windows_are_named() -> None:
    kv = make_kv((full(), 4, 9), (sliding(6), 4, 9), (chunked(8), 4, 9), (STATE, 0, 4), checkpoint_tokens=8)
    computed(kv, TOKENS, 8)
    stored = [event for event in kv.take_events() if isinstance(event, BlockStored)]
    assert {(event.group, event.kind, event.window_tokens) for event in stored} == {
        (0, "full", 0),
        (1, "sliding", 6),
        (2, "chunked", 8),
        (3, "recurrent", 0),
    }
    hashes = block_hashes(TOKENS[:8], 4)
    [checkpoint] = [event for event in stored if event.kind == "recurrent"]
    assert checkpoint == BlockStored(GroupId(3), "recurrent", hashes[1], hashes[0], TOKENS[4:8], 4)


def test_windows_of_specs() -> None:
    assert [window_tokens_of(spec) for spec in (full(), sliding(6), chunked(8), STATE)] == [0, 6, 8, 0]


def test_extra_keys_are_in_the_event_of_their_unit() -> None:
    kv = full_kv((4, 8))
    extras = HashExtras(salt="s", media=(MediaSpan("image", 3, 2, 2),))
    sequence = kv.new_sequence(extras=extras, prompt_tokens=12)
    kv.start(sequence, kv.no_hit(), 12)
    kv.advance(sequence, TOKENS, 12)
    assert [event.extras for event in kv.take_events() if isinstance(event, BlockStored)] == [
        [ExtraKey(ExtraKind.SALT, b"s"), ExtraKey(ExtraKind.MEDIA, b"image", 3)],
        [ExtraKey(ExtraKind.MEDIA, b"image", -1)],
        [],
    ]


def test_a_hash_goes_when_its_last_block_goes() -> None:
    kv = full_kv((4, 8))
    first, second = computed(kv, TOKENS, 4), computed(kv, TOKENS, 4)
    assert len(kv.take_events()) == 1
    kv.release(first)
    kv.forget_idle()
    assert kv.take_events() == []
    kv.grow(second, 8)
    kv.advance(second, TOKENS, 8)
    kv.take_events()
    kv.forget(second)
    hashes = block_hashes(TOKENS[:8], 4)
    assert kv.take_events() == [BlockRemoved(GroupId(0), block_hash) for block_hash in hashes]


def test_one_event_says_that_nothing_is_left() -> None:
    kv = full_kv((4, 8))
    kv.release(computed(kv, TOKENS, 8))
    kv.take_events()
    kv.forget_idle()
    assert kv.take_events() == [AllBlocksCleared(GroupId(0))]
    assert find(kv, TOKENS).tokens == 0


def test_a_snapshot_is_what_can_be_hit_parents_first() -> None:
    kv = make_kv((full(), 4, 9), (sliding(6), 4, 9), (STATE, 0, 4), checkpoint_tokens=8)
    sequence = computed(kv, TOKENS, 16)
    hashes = block_hashes(TOKENS[:16], 4)
    # The first unit goes and comes back: later than its children.
    kv.memory.pools[0].forget(hashes[0])
    again = new(kv)
    kv.start(again, kv.no_hit(), 4)
    kv.advance(again, TOKENS, 4)
    kv.memory.pools[1].forget(hashes[1])
    snapshot = kv.snapshot()
    assert [event.block_hash for event in snapshot if event.group == 0] == hashes
    windows = [(event.block_hash, event.parent_hash) for event in snapshot if event.group == 1]
    assert windows == [(hashes[0], None), (hashes[2], hashes[1]), (hashes[3], hashes[2])], "a parent may be gone"
    assert [event.block_hash for event in snapshot if event.group == 2] == [hashes[1], hashes[3]]
    assert sequence.published_units == 4


def test_a_snapshot_needs_the_tokens_of_events() -> None:
    kv = KvCoordinator(layout_of((full(), 4, 8)), enable_prefix_caching=True, batch_tokens=8)
    computed(kv, TOKENS, 8)
    assert find(kv, TOKENS).tokens == 8
    assert kv.take_events() == []
    with pytest.raises(InvariantError, match="recorded events"):
        kv.snapshot()


def test_chains_are_ordered_whatever_came_first() -> None:
    events = [BlockStored(GroupId(0), "full", bytes([i]), bytes([i - 1]) if i else None, [i], 1) for i in range(6)]
    mixed = [events[place] for place in (4, 2, 5, 0, 3)]
    ordered = parents_first(mixed)
    assert sorted(ordered, key=mixed.index) == mixed
    places = {event.block_hash: place for place, event in enumerate(ordered)}
    assert all(places.get(event.parent_hash or b"none", -1) < places[event.block_hash] for event in mixed)

"""The ledger of encoder outputs: references per occurrence, evictions by final state, and nothing lost for nobody."""

import random

import pytest

from headrace.base.errors import InvariantError
from headrace.kv.encoder_cache import EncoderCache


def _cache_of(*items: tuple[str, int], capacity: int = 10, budget: int = 100) -> EncoderCache:
    """A cache in which the items were used by "r0" and given back, in this order."""
    cache = EncoderCache(capacity, passing_rows=budget)
    for use, (identifier, rows) in enumerate(items):
        assert cache.allocate("r0", use, identifier, rows)
    cache.close_plan()
    for use in range(len(items)):
        cache.release("r0", use)
    return cache


def test_an_output_is_encoded_once_and_stays_while_idle() -> None:
    cache = EncoderCache(10, passing_rows=10)
    assert cache.allocate("r0", 0, "a", 4)
    assert cache.fresh() == [("a", "r0", 0)]
    assert cache.fresh_rows == 4
    assert cache.close_plan() == []
    assert cache.fresh() == []
    cache.release("r0", 0)
    assert cache.has("a")
    assert cache.used_rows == 0
    assert cache.free_rows == 10
    assert cache.resident_rows == 4
    assert not cache.allocate("r1", 0, "a", 4)
    assert cache.fresh() == []
    assert cache.used_rows == 4


def test_the_check_changes_nothing_so_an_unscheduled_request_evicts_nothing() -> None:
    # The published sequence: room for 10, a and b of 5 idle, r1 asks for 6 and is never scheduled, r2 takes a. An
    # engine that evicts in its check loses both; even with its notices filtered by final state it must report b and
    # encode a again. Here nothing had to go.
    cache = _cache_of(("a", 5), ("b", 5))
    assert cache.free_rows == 10
    assert cache.can_fit([("x", 6)])
    assert not cache.allocate("r2", 0, "a", 5)
    assert cache.close_plan() == []
    assert set(cache.identifiers) == {"a", "b"}
    assert cache.free_rows == 5
    assert cache.close_plan() == []


def test_notices_tell_of_the_final_state() -> None:
    # The same, but room is really needed: eager eviction takes a for x, and then b for a, which it encodes again.
    cache = _cache_of(("a", 5), ("b", 5))
    assert cache.allocate("r1", 0, "x", 4)
    assert not cache.allocate("r2", 0, "a", 5)
    assert cache.close_plan() == ["b"]
    assert set(cache.identifiers) == {"a", "x"}
    assert cache.free_rows == 1
    assert cache.close_plan() == []


def test_a_row_taken_back_leaves_no_trace() -> None:
    cache = _cache_of(("a", 5), ("b", 5))
    cache.allocate("r1", 0, "x", 5)
    cache.allocate("r1", 1, "a", 5)
    cache.undo("r1")
    assert not cache.has("x")
    assert cache.used_rows == 0
    assert cache.close_plan() == []
    assert set(cache.identifiers) == {"a", "b"}
    # The look at a did not make it younger than b.
    cache.allocate("r2", 0, "y", 5)
    assert cache.close_plan() == ["a"]


def test_undo_takes_back_this_plan_only() -> None:
    cache = EncoderCache(10, passing_rows=10)
    cache.allocate("r0", 0, "a", 3)
    cache.close_plan()
    cache.allocate("r0", 1, "b", 3)
    cache.undo("r0")
    assert cache.holds("r0", 0)
    assert not cache.holds("r0", 1)
    cache.undo("r0")
    assert cache.used_rows == 3


def test_the_next_owner_brings_an_item_whose_first_owner_lost_its_row() -> None:
    cache = EncoderCache(10, passing_rows=10)
    assert cache.allocate("r0", 2, "a", 3)
    assert not cache.allocate("r1", 0, "a", 3)
    cache.undo("r0")
    assert cache.fresh() == [("a", "r1", 0)]
    assert cache.fresh_rows == 3
    assert cache.close_plan() == []
    assert cache.has("a")


def test_the_same_image_twice_goes_with_its_last_occurrence() -> None:
    cache = EncoderCache(4, passing_rows=10)
    assert cache.allocate("r0", 0, "a", 4)
    assert not cache.allocate("r0", 1, "a", 4)
    assert cache.used_rows == 4
    cache.close_plan()
    cache.release("r0", 0)
    assert cache.used_rows == 4
    assert not cache.can_fit([("b", 1)])
    cache.release("r0", 1)
    assert cache.used_rows == 0
    assert cache.can_fit([("b", 1)])


def test_items_asked_for_together_are_counted_together() -> None:
    cache = _cache_of(("a", 5), ("b", 5))
    assert cache.can_fit([("a", 5), ("b", 5)])
    assert cache.can_fit([("c", 5), ("c", 5), ("a", 5)])
    assert not cache.can_fit([("c", 5), ("a", 5), ("b", 5)])
    cache.allocate("r1", 0, "a", 5)
    assert cache.can_fit([("a", 5), ("c", 5)])
    assert not cache.can_fit([("c", 6)])


def test_idle_outputs_go_oldest_first_and_only_as_far_as_needed() -> None:
    cache = _cache_of(("a", 3), ("b", 3), ("c", 3))
    cache.allocate("r1", 0, "a", 3)
    cache.close_plan()
    cache.release("r1", 0)
    cache.allocate("r2", 0, "x", 4)
    assert cache.close_plan() == ["b"]
    assert set(cache.identifiers) == {"a", "c", "x"}


def test_an_output_in_use_is_never_evicted() -> None:
    cache = EncoderCache(10, passing_rows=10)
    cache.allocate("r0", 0, "a", 6)
    cache.close_plan()
    assert not cache.can_fit([("b", 5)])
    with pytest.raises(InvariantError, match="does not fit"):
        cache.allocate("r1", 0, "b", 5)


def test_an_item_larger_than_the_cache_passes_through() -> None:
    cache = _cache_of(("a", 5))
    assert cache.can_fit([("big", 40)])
    assert cache.allocate("r1", 0, "big", 40)
    assert cache.used_rows == 0
    assert cache.close_plan() == []
    assert not cache.holds("r1", 0)
    # The next plan may use it once more without encoding; the one after that drops it.
    assert not cache.allocate("r1", 0, "big", 40)
    assert cache.close_plan() == []
    assert cache.close_plan() == ["big"]
    assert cache.allocate("r1", 0, "big", 40)
    assert cache.has("a")


def test_items_beside_the_cache_are_bounded_per_step() -> None:
    cache = EncoderCache(10, passing_rows=50)
    cache.allocate("r0", 0, "big", 40)
    assert not cache.can_fit([("huge", 20)])
    assert cache.can_fit([("small", 10)])
    cache.close_plan()
    assert not cache.can_fit([("big", 40), ("huge", 20)])
    assert cache.can_fit([("huge", 50)])
    cache.allocate("r1", 0, "huge", 20)
    assert cache.close_plan() == ["big"]


def test_no_cache_at_all_serves_everything_in_passing() -> None:
    cache = EncoderCache(0, passing_rows=8)
    assert cache.allocate("r0", 0, "a", 8)
    assert cache.close_plan() == []
    assert cache.close_plan() == ["a"]


def test_release_all_covers_planned_and_older_uses() -> None:
    cache = EncoderCache(10, passing_rows=10)
    cache.allocate("r0", 0, "a", 3)
    cache.close_plan()
    cache.allocate("r0", 1, "b", 3)
    cache.release_all("r0")
    assert cache.used_rows == 0
    assert cache.has("a")
    assert not cache.has("b")
    cache.release("r0", 0)
    cache.release("nobody", 7)
    assert cache.used_rows == 0


def test_a_victim_leaves_what_it_took_in_this_plan_as_old_as_before() -> None:
    cache = _cache_of(("a", 5), ("b", 5))
    cache.allocate("r1", 0, "a", 5)
    cache.release_all("r1")
    cache.allocate("r2", 0, "x", 5)
    assert cache.close_plan() == ["a"]


def test_reset_drops_what_nobody_holds_and_reports_it_once() -> None:
    cache = _cache_of(("a", 3), ("b", 3))
    cache.allocate("r1", 0, "b", 3)
    cache.close_plan()
    assert not cache.reset()
    assert cache.close_plan() == ["a"]
    assert cache.close_plan() == []
    cache.release("r1", 0)
    assert cache.reset()
    assert cache.allocate("r2", 0, "b", 3)
    # Encoded again in this plan under the same name: a notice would delete what the step needs.
    assert cache.close_plan() == []


def test_an_output_of_a_failed_owner_is_not_shared_any_more() -> None:
    cache = EncoderCache(10, passing_rows=10)
    cache.allocate("r0", 0, "a", 3)
    cache.allocate("r1", 0, "a", 3)
    cache.close_plan()
    cache.distrust("r0")
    cache.release_all("r0")
    assert not cache.has("a")
    assert cache.used_rows == 3
    assert cache.allocate("r2", 0, "a", 3)
    assert cache.close_plan() == []
    cache.release("r1", 0)
    assert cache.close_plan() == []
    assert cache.has("a")
    cache.distrust("r2")
    cache.release_all("r2")
    assert cache.close_plan() == ["a"]
    assert cache.used_rows == 0


class _Worker:
    """What the worker does with a plan, and what its memory holds."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def run(self, frees: list[str], encodes: dict[str, int], reads: set[str]) -> None:
        for identifier in frees:
            del self.rows[identifier]
        self.rows.update(encodes)
        assert reads <= set(self.rows), "an output was dropped before its last use"


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_never_miss_an_output_and_stay_within_memory(seed: int) -> None:
    rng = random.Random(seed)
    capacity, budget = rng.randint(0, 12), rng.randint(4, 16)
    sizes = {f"i{n}": rng.randint(1, min(budget, 14)) for n in range(8)}
    cache, worker = EncoderCache(capacity, passing_rows=budget), _Worker()
    held: dict[tuple[str, int], str] = {}
    for step in range(60):
        taken: dict[str, dict[int, str]] = {}
        for owner in rng.sample([f"r{n}" for n in range(4)], rng.randint(0, 4)):
            identifier, use = rng.choice(list(sizes)), step
            fresh_rows = 0 if cache.has(identifier) else sizes[identifier]
            if cache.fresh_rows + fresh_rows <= budget and cache.can_fit([(identifier, sizes[identifier])]):
                cache.allocate(owner, use, identifier, sizes[identifier])
                taken.setdefault(owner, {})[use] = identifier
        for owner in list(taken):
            if rng.random() < 0.3:
                cache.undo(owner)
                del taken[owner]
        encodes = {identifier: sizes[identifier] for identifier, _, _ in cache.fresh()}
        reads = {identifier for uses in taken.values() for identifier in uses.values()} | set(held.values())
        worker.run(cache.close_plan(), encodes, reads)
        assert set(cache.identifiers) == set(worker.rows)
        kept = sum(rows for rows in worker.rows.values() if rows <= capacity)
        assert kept <= capacity
        assert sum(worker.rows.values()) - kept <= budget
        for owner, uses in taken.items():
            held.update({(owner, use): name for use, name in uses.items() if sizes[name] <= capacity})
        for owner, use in list(held):
            if rng.random() < 0.4:
                cache.release(owner, use)
                del held[owner, use]
        assert cache.used_rows == sum(sizes[name] for name in set(held.values()))
    for owner in [f"r{n}" for n in range(4)]:
        cache.release_all(owner)
    assert cache.used_rows == 0
    assert not cache._held


def test_a_distrusted_output_takes_its_rows_until_nobody_holds_it() -> None:
    # The worker keeps it for its other reader, so an idle output has to make room for a new one.
    cache = EncoderCache(4, passing_rows=4)
    cache.allocate("broken", 0, "shared", 2)
    cache.allocate("reader", 0, "shared", 2)
    cache.allocate("other", 0, "idle", 2)
    cache.close_plan()
    cache.release("other", 0)
    cache.distrust("broken")
    cache.release_all("broken")
    assert (cache.used_rows, cache.resident_rows) == (2, 4)
    assert cache.can_fit([("new", 1)])
    cache.allocate("third", 0, "new", 1)
    assert cache.close_plan() == ["idle"]
    cache.release("reader", 0)
    assert cache.close_plan() == ["shared"]


def test_an_output_beside_the_cache_is_distrusted_after_its_step_too() -> None:
    cache = EncoderCache(4, passing_rows=10)
    assert cache.allocate("broken", 0, "img", 8)
    assert cache.close_plan() == []
    cache.distrust("broken", ["img"])
    assert cache.allocate("next", 0, "img", 8), "it must be encoded anew"
    assert cache.close_plan() == []
    cache.distrust("next", ["img"])
    assert cache.close_plan() == ["img"], "and the worker is told to drop it"

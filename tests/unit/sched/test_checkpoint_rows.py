"""Recurrent states in the scheduler: chunks end at boundaries, saves belong to rows, hits follow applied saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.kv.budget import fixed_layout
from headrace.types.cache_specs import FullAttentionSpec, KvLayout, LayerCache, RecurrentSpec, StatePart

Make = Callable[..., Any]


def hybrid(usable_blocks: int = 16) -> KvLayout:
    layers = [
        LayerCache(0, FullAttentionSpec(1, 4, 4, 2)),
        LayerCache(1, RecurrentSpec((StatePart("state", (16,), 4),))),
    ]
    return fixed_layout(layers, block_tokens=[4, 0], usable_blocks=usable_blocks)


def test_a_prompt_is_cut_at_its_last_boundary_and_saved_there(make_bench: Make) -> None:
    bench = make_bench(layout=hybrid())
    bench.add("a", 11)
    plans = [bench.step()[0] for _ in range(3)]
    assert [[(row.start, row.tokens) for row in plan.rows] for plan in plans[:2]] == [[(0, 8)], [(8, 3)]]
    assert [len(plan.saves) for plan in plans] == [1, 0, 0]
    assert plans[0].saves[0].source == plans[0].starts[0].blocks[1][0]
    assert bench.scheduler.stats().checkpoints == 1


def test_a_state_is_hit_after_its_step_is_applied_and_not_in_it(make_bench: Make) -> None:
    bench = make_bench(layout=hybrid(), steps_in_flight=2)
    bench.add("a", list(range(11)))
    first = bench.schedule()
    bench.add("b", list(range(11)))
    second = bench.schedule()
    assert [start.computed_tokens for start in second.starts] == [0]
    bench.apply(first)
    bench.add("c", list(range(11)))
    third = bench.schedule()
    (start,) = third.starts
    assert (start.request_id, start.computed_tokens) == ("c", 8)
    assert [(copy.group, copy.source, copy.target) for copy in third.copies] == [
        (1, first.saves[0].target, start.blocks[1][0])
    ]


def test_a_regular_boundary_in_the_output_is_saved_by_a_decode(make_bench: Make) -> None:
    bench = make_bench(layout=hybrid(), options={"checkpoint_tokens": 8})
    bench.add("a", 3, max_tokens=8)
    saves = []
    while bench.scheduler.has_work or bench.inbox:
        plan, _ = bench.step()
        saves += [(len(plan.decodes), save.group) for save in plan.saves]
    assert saves == [(1, 1)]


def test_the_last_block_goes_to_a_row_and_not_to_a_checkpoint(make_bench: Make) -> None:
    bench = make_bench(layout=hybrid(16), policy="priority", options={"checkpoint_tokens": 8})
    bench.add("late", 3, priority=1, max_tokens=9)
    for _ in range(4):
        bench.step()
    bench.add("first", 4, priority=0, max_tokens=9)
    bench.step()
    memory = bench.scheduler.kv.memory
    taken = []
    while memory.can_take([0, 2]):
        assert memory.reserve([0, 1])
        taken += memory.pools[1].allocate(1)
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"late": 1, "first": 1}, "late ends at position 8, first opens its second block"
    assert (plan.saves, bench.states()["late"]) == ([], "RUNNING")
    memory.pools[1].free(taken)
    bench.drain()
    assert [pool.live_blocks for pool in memory.pools] == [0, 0]


def test_a_long_prompt_that_ends_at_a_boundary_is_not_lengthened(make_bench: Make) -> None:
    bench = make_bench(layout=hybrid(40), max_num_batched_tokens=8, options={"checkpoint_tokens": 4})
    bench.add("long", 60, max_tokens=1)
    bench.add("tiny", 1, max_tokens=1)
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"long": 4, "tiny": 1}
    assert len(plan.saves) == 1

"""A long prompt takes an equal share while others have prompt tokens to compute, and whatever is left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.sched.shares import PrefillBudget

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("prefilling", "others_wait", "share"), [(0, False, 12), (1, False, 12), (1, True, 6), (3, False, 4), (3, True, 3)]
)
def test_the_share_is_the_budget_divided_evenly(prefilling: int, others_wait: bool, share: int) -> None:
    assert PrefillBudget(12, prefilling=prefilling, others_wait=others_wait).share_tokens == share


def test_a_share_is_never_nothing() -> None:
    assert PrefillBudget(2, prefilling=5, others_wait=True).share_tokens == 1


def test_long_means_more_than_two_whole_budgets() -> None:
    budget = PrefillBudget(5, prefilling=1, others_wait=False)
    assert not budget.is_long(10)
    assert budget.is_long(11)


def test_a_long_prompt_does_not_hold_up_a_short_one(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("long", 60)
    assert bench.chunks(bench.step()[0]) == {"long": 8}
    bench.add("short", 4)
    assert bench.chunks(bench.step()[0]) == {"long": 4, "short": 4}
    assert bench.chunks(bench.step()[0]) == {"short": 1, "long": 7}, "alone with its prompt it has the rest"


def test_what_others_leave_goes_to_the_long_prompt(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("long", 60)
    bench.step()
    bench.add("tiny", 1)
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"long": 7, "tiny": 1}
    (row,) = [row for row in plan.rows if row.request_id == "long"]
    assert (row.start, row.sample) == (8, False)


def test_a_waiting_request_that_cannot_start_costs_no_budget(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8, usable_blocks=16)
    bench.add("long", 60, max_tokens=1)  # 15 of 16 blocks
    bench.step()
    bench.add("waits", 12, max_tokens=1)
    for _ in range(3):
        assert bench.chunks(bench.step()[0]) == {"long": 8}


def test_several_long_prompts_share_and_the_oldest_has_the_remainder(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    for name in ("a", "b", "c"):
        bench.add(name, 40, max_tokens=1)
    for _ in range(2):
        assert bench.chunks(bench.step()[0]) == {"a": 4, "b": 2, "c": 2}


def test_a_prompt_near_its_end_is_not_long_any_more(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("a", 20)
    bench.step()
    bench.add("b", 16)
    assert bench.chunks(bench.step()[0]) == {"a": 8}
    assert bench.chunks(bench.step()[0]) == {"a": 4, "b": 4}


def test_the_remainder_respects_the_option_for_long_prompts(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    bench.add("long", 60)
    bench.step()
    bench.add("tiny", 1)
    assert bench.chunks(bench.step()[0]) == {"long": 6, "tiny": 1}


def test_the_row_that_is_lengthened_to_the_end_samples(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=9)
    bench.add("long", 28, max_tokens=2)
    bench.add("tiny", 1, max_tokens=1)
    assert bench.chunks(bench.step()[0]) == {"long": 8, "tiny": 1}
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"long": 9}
    for _ in range(2):
        plan, _ = bench.step()
    assert [(row.start, row.tokens, row.sample) for row in plan.rows] == [(26, 2, True)]


def test_blocks_for_the_remainder_are_appended_behind_the_start(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8, block_tokens=4)
    bench.add("long", 60)
    bench.add("tiny", 1)
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"long": 7, "tiny": 1}
    assert [len(start.blocks[0]) for start in plan.starts] == [1, 1]
    assert [(append.slot, len(append.blocks[0])) for append in plan.appends] == [(0, 1)]


def test_the_vector_of_one_decode_and_two_prompts_holds_because_neither_is_long(make_bench: Make) -> None:
    # engine.md section 5: R decodes, P=10, Q=3, budget 6: P lacks two budgets of 5, not more.
    bench = make_bench(max_num_batched_tokens=6)
    bench.add("R", 3)
    bench.step()
    bench.add("P", 10)
    bench.add("Q", 3)
    assert [bench.chunks(bench.step()[0]) for _ in range(3)] == [
        {"R": 1, "P": 5},
        {"R": 1, "P": 5},
        {"R": 1, "P": 1, "Q": 3},
    ]

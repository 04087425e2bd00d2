"""Blocks run out: who is the victim, what is taken back, how it resumes. Blocks hold 4 tokens here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.sched.request import RequestState
from headrace.types.outputs import FinishReason
from headrace.types.results import RowResult, TokenLogprobs

Make = Callable[..., Any]


def crowded(make_bench: Make, **config: Any) -> Any:
    """Two requests of 8 tokens on 5 blocks: the next step needs a third block for each."""
    bench = make_bench(usable_blocks=5, **config)
    bench.add("a", 8, max_tokens=6)
    bench.add("b", 8, max_tokens=6)
    return bench


def test_fcfs_preempts_the_tail_and_releases_its_slot_in_the_plan(make_bench: Make) -> None:
    bench = crowded(make_bench)
    bench.step()
    plan, _ = bench.step()
    assert plan.releases == [1]
    assert bench.chunks(plan) == {"a": 1}
    assert plan.starts == [], "nobody starts in a step that preempts"
    (victim,) = bench.scheduler.waiting
    assert (victim.request_id, victim.state, victim.slot) == ("b", RequestState.PREEMPTED, None)
    assert bench.scheduler.stats().preemptions == 1


def test_a_preempted_request_resumes_with_its_outputs_as_known_tokens(make_bench: Make) -> None:
    bench = crowded(make_bench)
    _, deltas = bench.step({"b": 555})
    sampled = {delta.request_id: delta.new_token_ids for delta in deltas}
    assert sampled["b"] == [555]
    bench.step()
    bench.abort("a")
    plan, deltas = bench.step()
    (start,) = plan.starts
    assert (start.request_id, start.prompt_tokens, list(start.token_ids[8:])) == ("b", 8, [555])
    assert start.computed_tokens == 8, "its own blocks were freed, not evicted"
    assert bench.chunks(plan) == {"b": 1}
    (delta,) = deltas
    assert (delta.preemptions, delta.cached_tokens) == (1, 0), "its own work is no saving, and usage must not say so"
    assert delta.first_scheduled_s is None, "sent once"


def test_priority_preempts_the_least_important_even_if_it_is_older(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=5, policy="priority")
    bench.add("a", 8, priority=9, max_tokens=10)
    bench.add("b", 8, priority=0, max_tokens=10)
    bench.step()
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"b": 1}
    assert [item.request_id for item in bench.scheduler.waiting] == ["a"]


def test_a_victim_already_planned_is_taken_back_in_full(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=6, policy="priority", max_num_batched_tokens=16, long_prefill_token_threshold=8)
    bench.add("long", 16, priority=0, max_tokens=4)  # 4 blocks, 2 of them in the first step
    bench.add("short", 4, priority=9, max_tokens=10)  # 1 block; its second token needs another
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"long": 8, "short": 4}
    plan, _ = bench.step()  # 6 blocks: long 4, short 2: just fits
    assert bench.chunks(plan) == {"short": 1, "long": 8}
    plan, _ = bench.step()  # short is planned first, long needs a fifth block and takes it from short
    assert bench.chunks(plan) == {"long": 1}
    assert plan.releases == [1]
    assert [append.slot for append in plan.appends] == [0]
    (victim,) = bench.scheduler.waiting
    assert victim.known_tokens == len(victim.token_ids) == 6
    assert bench.free_blocks == 1


def test_the_requester_may_be_the_victim(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=5, policy="priority")
    bench.add("a", 8, priority=9, max_tokens=10)
    bench.add("b", 11, priority=0, max_tokens=9)
    bench.step()
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"b": 1}
    assert [item.request_id for item in bench.scheduler.waiting] == ["a"]


def test_a_sample_in_flight_at_preemption_is_kept(make_bench: Make) -> None:
    bench = crowded(make_bench, steps_in_flight=2)
    first = bench.schedule()
    second = bench.schedule()
    assert second.releases == [1]
    deltas = bench.apply(first, {"b": 777})
    assert [delta.new_token_ids for delta in deltas if delta.request_id == "b"] == [[777]]
    (victim,) = bench.scheduler.waiting
    assert list(victim.token_ids[8:]) == [777]
    assert victim.computed_tokens == 0, "its blocks are gone: that step is no progress"
    bench.abort("a")
    plan = bench.schedule()
    assert list(plan.starts[0].token_ids[8:]) == [777]
    bench.apply(second)
    assert [delta.request_id for delta in bench.apply(plan)] == ["b"]


def test_blocks_of_a_request_preempted_in_flight_are_not_published(make_bench: Make) -> None:
    bench = crowded(make_bench, steps_in_flight=2)
    first = bench.schedule()
    bench.schedule()
    bench.apply(first)
    assert bench.scheduler.stats().blocks_cached == 2, "two of a, none of b"


def test_a_request_may_finish_while_it_is_preempted(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=5, steps_in_flight=2)
    bench.add("a", 8, max_tokens=6)
    bench.add("b", 8, max_tokens=6, stop_token_ids=[42])
    first = bench.schedule()
    second = bench.schedule()
    (delta,) = [item for item in bench.apply(first, {"b": 42}) if item.request_id == "b"]
    assert (delta.finish_reason, delta.stop_token_id, delta.preemptions) == (FinishReason.STOP, 42, 1)
    assert bench.scheduler.waiting == []
    bench.apply(second)
    assert bench.schedule().releases == [], "its slot was released when it was preempted"


def test_prompt_logprobs_are_not_sent_twice(make_bench: Make) -> None:
    def entries(*positions: int) -> list[TokenLogprobs]:
        return [TokenLogprobs(position, -1.0, 1, [], []) for position in positions]

    bench = make_bench(usable_blocks=5, policy="priority", long_prefill_token_threshold=5)
    bench.add("b", 12, max_tokens=2, priority=9, prompt_logprobs=0)
    bench.step()
    bench.add("a", 8, max_tokens=10, priority=0)
    plan = bench.schedule()
    assert [(row.request_id, row.start, row.tokens) for row in plan.rows] == [("b", 5, 5), ("a", 0, 5)]
    (part,) = bench.apply(plan, b=RowResult([], prompt_logprobs=entries(6, 7, 8, 9, 10)))
    assert [item.token_id for item in part.prompt_logprobs] == [6, 7, 8, 9, 10]
    assert part.new_token_ids == []
    bench.step()
    bench.step()  # "a" needs its third block
    assert [item.request_id for item in bench.scheduler.waiting] == ["b"]
    bench.abort("a")
    plan = bench.schedule()
    assert plan.starts[0].computed_tokens == 0, "still no hits"
    assert bench.apply(plan, b=RowResult([], prompt_logprobs=entries(1, 2, 3, 4, 5)))[0].prompt_logprobs is None


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_all_blocks_come_back(make_bench: Make, steps_in_flight: int) -> None:
    bench = crowded(make_bench, steps_in_flight=steps_in_flight)
    plans = [bench.schedule() for _ in range(steps_in_flight)]
    while bench.scheduler.has_work or plans:
        if plans:
            bench.apply(plans.pop(0))
        if bench.scheduler.has_work:
            plans.append(bench.schedule())
    assert bench.free_blocks == 5

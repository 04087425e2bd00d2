"""Encoder outputs in the scheduler: chunks are cut before what does not fit, nobody loops without a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.types.outputs import FinishReason
from headrace.types.requests import MediaSpan
from headrace.types.results import RowResult

Make = Callable[..., Any]


def make_media_bench(make_bench: Make, *, cache_rows: int = 64, budget_rows: int = 64, **config: Any) -> Any:
    return make_bench(options={"encoder_cache_rows": cache_rows, "encoder_budget_rows": budget_rows}, **config)


def image(name: str, start: int, rows: int) -> MediaSpan:
    return MediaSpan(name, start, rows, rows)


def test_the_vector_of_three_prompts_with_one_item_each(make_bench: Make) -> None:
    # engine.md section 5: three prompts of 800 with media at 100..700, budgets of 1024 -> 800/100/100, then 1/700/0.
    bench = make_media_bench(
        make_bench,
        cache_rows=1024,
        budget_rows=1024,
        max_num_batched_tokens=1024,
        usable_blocks=1000,
        max_model_len=1000,
    )
    for name in "abc":
        bench.add(name, 800, media=[image(name, 100, 600)])
    assert bench.chunks(bench.step()[0]) == {"a": 800, "b": 100, "c": 100}
    assert bench.chunks(bench.step()[0]) == {"a": 1, "b": 700}
    assert bench.chunks(bench.step()[0]) == {"a": 1, "b": 1, "c": 700}


def test_a_plan_runs_each_encoder_once_and_drops_what_is_gone(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, cache_rows=6)
    bench.add("a", 8, media=[image("x", 1, 4)], max_tokens=1)
    bench.add("b", 8, media=[image("x", 2, 4)], max_tokens=1)
    plan, _ = bench.step()
    assert [(item.identifier, item.request_id) for item in plan.encodes] == [("x", "a")]
    assert [start.media for start in plan.starts] == [[image("x", 1, 4)], [image("x", 2, 4)]]
    assert (bench.scheduler.stats().encoder_rows_used, bench.scheduler.stats().encoder_rows_resident) == (0, 4)
    bench.add("c", 8, media=[image("y", 1, 5)], max_tokens=1)
    plan, _ = bench.step()
    assert ([item.identifier for item in plan.encodes], plan.encoder_frees) == (["y"], ["x"])


def test_an_output_is_kept_until_the_step_that_reads_it_is_applied(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, cache_rows=4, steps_in_flight=2, max_num_batched_tokens=6)
    bench.add("a", 10, media=[image("x", 4, 4)])
    first = bench.schedule()
    assert [item.identifier for item in first.encodes] == ["x"]
    second = bench.schedule()
    assert (second.encoder_frees, bench.scheduler.stats().encoder_rows_used) == ([], 4)
    bench.apply(first)
    assert bench.scheduler.stats().encoder_rows_used == 4, "position 7 has been planned and not applied"
    bench.apply(second)
    assert bench.scheduler.stats().encoder_rows_used == 0


def test_two_items_that_do_not_fit_together_are_taken_one_after_the_other(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, cache_rows=4, budget_rows=8)
    bench.add("a", 12, media=[image("x", 1, 4), image("y", 6, 4)], max_tokens=1)
    chunks = [bench.chunks(bench.step()[0]) for _ in range(2)]
    assert chunks == [{"a": 6}, {"a": 6}]
    bench.step()
    assert not bench.scheduler.has_work


def test_an_item_larger_than_the_cache_is_served_and_not_kept(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, cache_rows=2, budget_rows=8, max_num_batched_tokens=6)
    bench.add("a", 12, media=[image("x", 1, 8)], max_tokens=1)
    plans = []
    while bench.scheduler.has_work or bench.inbox:
        plans.append(bench.step()[0])
    assert [sum(row.tokens for row in plan.rows) for plan in plans if plan.rows] == [6, 6]
    assert [item.identifier for plan in plans for item in plan.encodes] == ["x"], (
        "it stays while the next step reads it"
    )
    assert [plan.encoder_frees for plan in plans] == [[], [], ["x"]]


def test_an_item_that_never_fits_and_media_without_an_encoder_are_refused(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, budget_rows=8)
    bench.add("a", 12, media=[image("x", 1, 9)])
    _, (delta,) = bench.step()
    assert (delta.error.code, delta.error.param) == ("media_too_large", "media")
    bench = make_bench()
    bench.add("a", 12, media=[image("x", 1, 9)])
    _, (delta,) = bench.step()
    assert (delta.finish_reason, delta.error.http_status) == (FinishReason.ERROR, 501)
    assert "no encoder" in delta.error.message


def test_who_finds_no_room_for_its_item_is_passed_over(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, cache_rows=4, budget_rows=4, max_num_batched_tokens=16)
    bench.add("a", 8, media=[image("x", 0, 4)], max_tokens=4)
    bench.add("b", 8, media=[image("y", 0, 4)], max_tokens=4)
    bench.add("text", 5)
    assert bench.chunks(bench.step()[0]) == {"a": 8, "text": 5}
    assert bench.states()["b"] == "WAITING"
    assert bench.chunks(bench.step()[0]) == {"a": 1, "text": 1, "b": 8}


def test_many_that_find_no_room_are_not_looked_up_all_the_time(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, cache_rows=4, budget_rows=4, max_num_seqs=20, usable_blocks=200)
    lookups, find_hit = [], bench.scheduler.kv.find_hit
    bench.scheduler.kv.find_hit = lambda *given: lookups.append(1) or find_hit(*given)
    bench.add("a", 8, media=[image("x", 0, 4)])
    for number in range(15):
        bench.add(f"b{number}", 8, media=[image(f"y{number}", 0, 4)])
    bench.schedule()
    assert len(lookups) == 1 + 8


def test_the_last_token_of_a_prompt_may_be_of_an_item(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, max_num_batched_tokens=7)
    bench.add("a", 8, media=[image("x", 4, 4)])
    bench.step()
    plan, _ = bench.step()
    assert [(row.start, row.tokens) for row in plan.rows] == [(7, 1)], "not a plain decode: it reads the output"
    plan, _ = bench.step()
    assert (plan.rows, plan.decodes) == ([], [0]), "from here on it is one"


def test_a_preempted_request_gives_its_outputs_up_and_takes_them_again(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, usable_blocks=5)
    bench.add("a", 8, max_tokens=6)
    bench.add("b", 8, media=[image("x", 0, 8)], max_tokens=6)
    bench.step()
    bench.step()
    assert bench.states()["b"] == "PREEMPTED"
    assert bench.scheduler.stats().encoder_rows_used == 0
    ends = {delta.request_id for delta in bench.drain() if delta.finish_reason is FinishReason.LENGTH}
    assert ends == {"a", "b"}


def test_outputs_of_a_failed_row_are_not_trusted(make_bench: Make) -> None:
    bench = make_media_bench(make_bench, max_num_batched_tokens=6)
    bench.add("a", 8, media=[image("x", 0, 8)])
    bench.apply(bench.schedule(), a=RowResult([], error="NaN"))
    bench.add("b", 8, media=[image("x", 0, 8)])
    plan, _ = bench.step()
    assert [item.request_id for item in plan.encodes] == ["b"]

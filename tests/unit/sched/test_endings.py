"""How requests end: stop rules, aborts at any moment, results that come too late, refusals, failed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import InvariantError
from headrace.kv.prefix_hash import block_hashes
from headrace.types.outputs import FinishReason
from headrace.types.results import RowResult, TokenLogprobs

Make = Callable[..., Any]


def outputs(bench: Any, tokens: list[int], name: str = "a") -> list[Any]:
    """Feed tokens one a step and return the deltas of one request."""
    found = []
    for token in tokens:
        found += [delta for delta in bench.step({name: token})[1] if delta.request_id == name]
    return found


def test_eos_ends_a_request_and_is_part_of_it(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", eos_token_ids=[2, 3])
    first, last = outputs(bench, [10, 3])
    assert (first.finish_reason, first.first_scheduled_s) == (None, 0.0)
    assert (last.new_token_ids, last.finish_reason, last.stop_token_id) == ([3], FinishReason.STOP, 3)
    assert last.first_scheduled_s is None


def test_ignored_eos_does_not_end_it_but_a_stop_token_does(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", eos_token_ids=[3], ignore_eos=True, stop_token_ids=[4])
    deltas = outputs(bench, [3, 4])
    assert [delta.finish_reason for delta in deltas] == [None, FinishReason.STOP]


def test_an_ignored_eos_that_is_also_a_stop_token_ends_it(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", eos_token_ids=[3], ignore_eos=True, stop_token_ids=[3])
    assert outputs(bench, [3])[0].finish_reason is FinishReason.STOP


def test_min_tokens_gates_eos_and_stop_tokens(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", eos_token_ids=[3], stop_token_ids=[4], min_tokens=3)
    deltas = outputs(bench, [3, 4, 3])
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]


def test_max_tokens_and_model_length(make_bench: Make) -> None:
    bench = make_bench(max_model_len=6)
    bench.add("a", 3, max_tokens=2)
    bench.add("b", 3, max_tokens=None)
    bench.add("c", 3, max_tokens=50)
    counts = {"a": 0, "b": 0, "c": 0}
    while bench.scheduler.has_work or bench.inbox:
        for delta in bench.step()[1]:
            counts[delta.request_id] += 1
            assert (delta.finish_reason is FinishReason.LENGTH) == (
                counts[delta.request_id] == (2 if delta.request_id == "a" else 3)
            )
    assert counts == {"a": 2, "b": 3, "c": 3}


def test_stop_wins_over_length(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", max_tokens=1, stop_token_ids=[4])
    assert outputs(bench, [4])[0].finish_reason is FinishReason.STOP


def test_the_last_sample_is_never_computed(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=1, block_tokens=4, max_model_len=5)
    bench.add("a", 4, max_tokens=1)
    (delta,) = outputs(bench, [9])
    assert delta.finish_reason is FinishReason.LENGTH, "5 tokens, of which 4 need room"


def test_overlap_plans_no_step_beyond_a_known_length(make_bench: Make) -> None:
    bench = make_bench(steps_in_flight=2)
    bench.add("a", 3, max_tokens=2)
    first, second = bench.schedule(), bench.schedule()
    assert (first.total_tokens, second.total_tokens) == (3, 1)
    bench.apply(first)
    third = bench.schedule()
    assert third.total_tokens == 0
    (delta,) = bench.apply(second)
    assert delta.finish_reason is FinishReason.LENGTH
    assert bench.apply(third) == []
    assert bench.schedule().releases == [0]
    assert not bench.scheduler.has_work


def test_eos_with_the_next_step_in_flight_drops_the_overshoot(make_bench: Make) -> None:
    bench = make_bench(steps_in_flight=2)
    bench.add("a", 3, eos_token_ids=[2])
    first, second = bench.schedule(), bench.schedule()
    assert second.decodes == [0]
    (delta,) = bench.apply(first, {"a": 2})
    assert (delta.new_token_ids, delta.finish_reason) == ([2], FinishReason.STOP)
    bench.add("b", 3)
    third = bench.schedule()
    assert (third.releases, [start.slot for start in third.starts]) == ([0], [0]), "released and taken in one plan"
    assert bench.apply(second) == [], "the overshoot never reaches anyone"
    assert [item.request_id for item in bench.apply(third)] == ["b"]


@pytest.mark.parametrize("moment", ["queued", "running", "in flight", "finished", "unknown"])
def test_abort_at_any_moment_is_silent_and_frees_at_once(make_bench: Make, moment: str) -> None:
    bench = make_bench(steps_in_flight=2, max_num_seqs=1)
    bench.add("a", 5, max_tokens=1 if moment == "finished" else 9)
    flight = []
    if moment != "queued":
        flight.append(bench.schedule())
        if moment != "in flight":
            bench.apply(flight.pop())
    bench.abort("nobody" if moment == "unknown" else "a")
    flight.append(bench.schedule())
    late = [delta for plan in flight for delta in bench.apply(plan)]
    if moment == "unknown":
        assert [delta.request_id for delta in late] == ["a"]
        return
    assert late == []
    assert bench.free_blocks == 64
    assert flight[-1].releases == ([] if moment == "queued" else [0])
    assert not bench.scheduler.has_work
    bench.add("b")
    assert [start.request_id for start in bench.schedule().starts] == ["b"]


def test_an_added_and_aborted_request_never_starts(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a")
    bench.abort("a")
    assert bench.schedule().starts == []
    assert not bench.scheduler.has_work


def refusal(bench: Any) -> Any:
    plan, deltas = bench.step()
    assert plan.total_tokens == 0
    (delta,) = deltas
    assert delta.finish_reason is FinishReason.ERROR
    assert not bench.scheduler.has_work
    return delta.error


def test_a_request_that_never_fits_is_refused_with_the_numbers(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=3, max_model_len=100)
    bench.add("a", 10, max_tokens=4)
    error = refusal(bench)
    assert (error.code, error.http_status, error.param) == ("kv_cache_too_small", 400, "max_tokens")
    for number in ("13 tokens", "10 of them prompt", "4 blocks of 4", "at most 3", "fits is 12"):
        assert number in error.message
    bench.add("b", 10, max_tokens=3)
    assert len(bench.step()[0].rows) == 1


def test_a_prompt_without_room_for_a_token_is_refused(make_bench: Make) -> None:
    bench = make_bench(max_model_len=8)
    bench.add("a", 8)
    error = refusal(bench)
    assert (error.code, error.http_status) == ("context_length_exceeded", 400)
    assert "at most 7" in error.message
    bench.add("b", 7)
    assert len(bench.step()[0].rows) == 1


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1, 2**32], {}, "prompt"),
        ([1, 2, 3, 4], {"block_hashes": block_hashes(list(range(8)), 4)}, "block_hashes"),
        ([1, 2, 3, 4], {"block_hashes": [b"short"]}, "block_hashes"),
    ],
)
def test_wrong_requests_are_refused_one_by_one(
    make_bench: Make, prompt: list[int], fields: dict[str, Any], param: str
) -> None:
    bench = make_bench()
    bench.add("a", prompt, **fields)
    error = refusal(bench)
    assert (error.code, error.param) == ("invalid_request", param)


def test_an_id_in_use_is_refused_and_its_owner_lives(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a")
    bench.add("a")
    plan, deltas = bench.step()
    assert len(plan.rows) == 1
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ERROR, None]


def test_a_full_queue_is_overload_and_free_slots_are_not_a_queue(make_bench: Make) -> None:
    bench = make_bench(max_num_seqs=2, max_queue=1)
    for name in "abcd":
        bench.add(name)
    plan, deltas = bench.step()
    assert len(plan.rows) == 2
    (error,) = [delta.error for delta in deltas if delta.error]
    assert (error.code, error.http_status, error.retryable) == ("overloaded", 503, True)
    assert bench.scheduler.stats().waiting == 1


def test_refusals_come_out_although_nothing_runs(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", [])
    plan = bench.schedule()
    assert bench.scheduler.has_work
    assert len(bench.apply(plan)) == 1


def test_a_failed_row_ends_its_request_alone_and_leaves_nothing_to_hit(make_bench: Make) -> None:
    bench = make_bench(block_tokens=4)
    bench.add("a", list(range(20, 33)))
    bench.add("b", 5)
    bench.step()
    assert bench.scheduler.stats().blocks_cached == 4
    plan = bench.schedule()
    bad, good = bench.apply(plan, a=RowResult([], error="NaN"))
    assert (bad.finish_reason, bad.error.code, bad.error.http_status) == (FinishReason.ERROR, "non_finite_logits", 500)
    assert "NaN" in bad.error.message
    assert (good.request_id, good.finish_reason) == ("b", None)
    bench.add("c", list(range(20, 33)))
    plan = bench.schedule()
    assert plan.releases == [0]
    assert plan.starts[0].computed_tokens == 0


def test_a_resubmitted_request_continues_its_output(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", 5, produced_token_ids=[70, 71], max_tokens=4, min_tokens=4, stop_token_ids=[9])
    plan, deltas = bench.step({"a": 9})
    assert list(plan.starts[0].token_ids[5:]) == [70, 71]
    assert plan.starts[0].prompt_tokens == 5
    assert deltas[0].finish_reason is None, "three outputs, min_tokens 4"
    assert outputs(bench, [9])[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"produced_token_ids": [70, 71], "max_tokens": 2}, FinishReason.LENGTH),
        ({"produced_token_ids": [70, 9], "stop_token_ids": [9]}, FinishReason.STOP),
    ],
)
def test_a_resubmitted_request_may_be_finished_already(
    make_bench: Make, fields: dict[str, Any], reason: FinishReason
) -> None:
    bench = make_bench()
    bench.add("a", 5, **fields)
    plan, (delta,) = bench.step()
    assert (plan.rows, delta.finish_reason, delta.new_token_ids) == ([], reason, [])
    assert not bench.scheduler.has_work


def test_logprobs_pass_through(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", 3, logprobs=1)
    entry = TokenLogprobs(5, -0.5, 1, [5], [-0.5])
    (first,) = bench.apply(bench.schedule(), a=RowResult([5], logprobs=[entry]))
    (second,) = bench.apply(bench.schedule(), a=RowResult([5], logprobs=[entry]))
    assert first.logprobs == second.logprobs == [entry]


def test_a_row_without_its_sample_is_a_bug_of_the_worker(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", 3)
    with pytest.raises(InvariantError, match="0 tokens sampled"):
        bench.apply(bench.schedule(), a=RowResult([]))

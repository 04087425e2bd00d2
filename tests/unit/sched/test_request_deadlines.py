"""Deadlines end a request wherever it is, and say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.base.ids import RequestId
from headrace.sched.deadlines import Deadlines
from headrace.types.outputs import FinishReason

Make = Callable[..., Any]


def test_a_running_request_ends_at_its_deadline(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", 3, deadline_s=2.0, max_tokens=20)
    bench.add("b", 3)
    bench.step()
    bench.step()
    plan, deltas = bench.step()
    assert plan.releases == [0]
    (delta,) = [delta for delta in deltas if delta.request_id == "a"]
    assert delta.finish_reason is FinishReason.ERROR
    assert (delta.error.code, delta.error.http_status, delta.error.retryable) == ("request_timeout", 504, False)
    for part in ("running", "2 of at most 20 output tokens", "--request-timeout-s"):
        assert part in delta.error.message
    assert bench.scheduler.stats().timeouts == 1
    assert bench.states() == {"b": "RUNNING"}


def test_a_waiting_request_ends_too(make_bench: Make) -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add("a")
    bench.add("waits", deadline_s=1.0)
    bench.add("parked", deadline_s=1.0, grammar="g")
    bench.step()
    _, deltas = bench.step()
    errors = {str(delta.request_id): delta.error for delta in deltas if delta.error}
    assert sorted(errors) == ["parked", "waits"]
    assert "waiting for its grammar" in errors["parked"].message


def test_a_request_that_comes_too_late_never_starts(make_bench: Make) -> None:
    bench = make_bench()
    bench.now_s = 5.0
    bench.add("a", deadline_s=5.0)
    plan, (delta,) = bench.step()
    assert (plan.starts, delta.finish_reason) == ([], FinishReason.ERROR)


def test_results_in_flight_at_the_deadline_are_dropped(make_bench: Make) -> None:
    bench = make_bench(steps_in_flight=2)
    bench.add("a", 3, deadline_s=0.5)
    first = bench.schedule()
    bench.now_s = 1.0
    second = bench.schedule()
    (delta,) = bench.apply(first)
    assert delta.finish_reason is FinishReason.ERROR
    assert bench.apply(second) == []
    bench.step()
    assert not bench.scheduler.has_work


def test_who_ends_in_time_hears_nothing_of_it(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", max_tokens=1, deadline_s=2.0)
    assert bench.scheduler.next_event_s is None
    bench.step()
    assert bench.scheduler.next_event_s == 2.0
    bench.now_s = 9.0
    assert bench.step()[1] == []
    assert bench.scheduler.next_event_s is None


def test_the_heap_forgets_those_that_ended_long_before_their_deadline() -> None:
    live: dict[RequestId, None] = {}
    deadlines = Deadlines(live)
    for number in range(1000):
        live[RequestId(f"r{number}")] = None
        deadlines.add(RequestId(f"r{number}"), 1e9 + number)
        live.pop(RequestId(f"r{number - 3}"), None)
    assert len(deadlines._heap) <= 70
    assert deadlines.due(2e9) == ["r997", "r998", "r999"]

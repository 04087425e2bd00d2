"""Requests that wait for something other than room: grammars, leaders. Nobody behind them waits with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.ids import RequestId
from headrace.types.events import GrammarReady
from headrace.types.outputs import ErrorRecord, FinishReason
from headrace.types.results import RowResult

Make = Callable[..., Any]
PROMPT = list(range(13))


def started(plan: Any) -> list[str]:
    return [str(start.request_id) for start in plan.starts]


def test_a_request_waits_for_its_grammar_and_others_pass(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("g", grammar="root ::= x")
    bench.add("plain")
    assert started(bench.step()[0]) == ["plain"]
    assert bench.states()["g"] == "GRAMMAR"
    assert bench.scheduler.stats().waiting_grammar == 1
    bench.post(GrammarReady(RequestId("g")))
    assert started(bench.step()[0]) == ["g"]


def test_rows_with_a_grammar_are_gated_where_they_sample(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=4)
    bench.add("g", 6, grammar="g", max_tokens=3)
    bench.post(GrammarReady(RequestId("g")))
    rows = [row for _ in range(3) for row in bench.step()[0].rows]
    assert [(row.tokens, row.sample, row.gated) for row in rows] == [
        (4, False, False),
        (2, True, True),
        (1, True, True),
    ]


def test_a_gated_row_may_be_planned_before_the_last_result(make_bench: Make) -> None:
    bench = make_bench(steps_in_flight=2)
    bench.add("g", 3, grammar="g")
    bench.post(GrammarReady(RequestId("g")))
    bench.schedule()
    (row,) = bench.schedule().rows
    assert (row.start, row.sample, row.gated) == (3, True, True)


def test_a_grammar_that_fails_ends_this_request_alone(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("g", grammar="(")
    bench.add("other")
    error = ErrorRecord("invalid_request", "invalid_request_error", "the grammar does not end", 400, False, "grammar")
    bench.post(GrammarReady(RequestId("g"), error))
    _, deltas = bench.step()
    ends = {delta.request_id: delta for delta in deltas}
    assert (ends["g"].finish_reason, ends["g"].error) == (FinishReason.ERROR, error)
    assert ends["other"].finish_reason is None


def test_stale_news_of_grammars_are_ignored(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("g", grammar="g")
    bench.abort("g")
    bench.post(GrammarReady(RequestId("g")), GrammarReady(RequestId("nobody")))
    bench.step()
    assert not bench.scheduler.has_work
    bench.add("h", grammar="g")
    ready = GrammarReady(RequestId("h"))
    bench.post(ready)
    bench.step()
    bench.post(ready, GrammarReady(RequestId("h"), ErrorRecord("x", "x", "too late", 400, False)))
    assert bench.chunks(bench.step()[0]) == {"h": 1}


def test_a_preempted_request_does_not_wait_for_its_grammar_again(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=5)
    bench.add("a", 8, max_tokens=6)
    bench.add("g", 8, max_tokens=6, grammar="g")
    bench.post(GrammarReady(RequestId("g")))
    bench.step()
    bench.step()
    assert bench.states()["g"] == "PREEMPTED"
    assert {delta.request_id for delta in bench.drain() if delta.finish_reason is FinishReason.LENGTH} == {"a", "g"}


def test_a_follower_waits_until_its_leader_has_applied_the_prompt(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8, steps_in_flight=2)
    bench.add("lead", PROMPT)
    bench.add("follow", PROMPT, leader_id="lead")
    first = bench.schedule()
    second = bench.schedule()
    assert bench.chunks(first) == {"lead": 8}
    assert bench.chunks(second) == {"lead": 5}, "the follower is parked, not computed beside it"
    assert bench.states()["follow"] == "LEADER"
    assert bench.scheduler.stats().waiting_leader == 1
    bench.apply(first)
    assert bench.states()["follow"] == "LEADER", "planned is not applied"
    bench.apply(second)
    (start,) = bench.schedule().starts
    assert (start.request_id, start.computed_tokens) == ("follow", 12)


@pytest.mark.parametrize("end", ["abort", "error"])
def test_a_follower_goes_on_when_its_leader_ends(make_bench: Make, end: str) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("lead", PROMPT)
    bench.add("follow", PROMPT, leader_id="lead")
    plan = bench.schedule()
    if end == "abort":
        bench.abort("lead")
        bench.apply(plan)
    else:
        bench.apply(plan, lead=RowResult([], error="NaN"))
    assert started(bench.schedule()) == ["follow"]


def test_a_preempted_leader_is_still_waited_for(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=8, policy="priority", max_num_batched_tokens=8)
    bench.add("urgent", 4, max_tokens=4)
    bench.add("lead", PROMPT, priority=1, max_tokens=1)
    bench.add("follow", PROMPT, priority=1, max_tokens=1, leader_id="lead")
    bench.step()
    pool = bench.scheduler.kv.memory.pools[0]
    taken = pool.allocate(bench.free_blocks)
    bench.step()
    assert bench.states() == {"urgent": "RUNNING", "lead": "PREEMPTED", "follow": "LEADER"}
    pool.free(taken)
    starts = {}
    while bench.scheduler.has_work:
        starts |= {str(start.request_id): start.computed_tokens for start in bench.step()[0].starts}
    assert starts["follow"] == 12


@pytest.mark.parametrize(
    ("caching", "fields", "prompt"),
    [
        (False, {}, PROMPT),
        (True, {"prompt_logprobs": 0}, PROMPT),
        (True, {"leader_id": "nobody"}, PROMPT),
        (True, {}, [1, 2, 3, 4]),
    ],
)
def test_nobody_waits_for_nothing(make_bench: Make, caching: bool, fields: dict[str, Any], prompt: list[int]) -> None:
    bench = make_bench(caching=caching)
    bench.add("lead", prompt)
    bench.add("follow", prompt, **({"leader_id": "lead"} | fields))
    assert started(bench.step()[0]) == ["lead", "follow"]


def test_a_follower_with_a_grammar_waits_for_both(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("lead", PROMPT)
    bench.add("follow", PROMPT, leader_id="lead", grammar="g")
    bench.step()
    assert bench.states()["follow"] == "GRAMMAR"
    bench.post(GrammarReady(RequestId("follow")))
    bench.schedule()
    assert bench.states()["follow"] == "LEADER"


def test_parked_requests_can_be_aborted_and_keep_their_order(make_bench: Make) -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add("g1", grammar="g", arrival_s=1.0)
    bench.add("g2", grammar="g", arrival_s=2.0)
    bench.add("late", arrival_s=3.0)
    bench.add("follow", PROMPT, leader_id="late", arrival_s=4.0)
    bench.abort("follow")
    bench.step()
    assert [request.request_id for request in bench.scheduler.waiting] == ["g1", "g2"]
    bench.post(GrammarReady(RequestId("g2")), GrammarReady(RequestId("g1")))
    bench.abort("late")
    assert started(bench.step()[0]) == ["g1"], "who was let in first does not matter"

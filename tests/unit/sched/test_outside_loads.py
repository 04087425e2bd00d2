"""Loads from an outside store in the scheduler: states, slots, memory and deadlines, on every way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.base.ids import RequestId, Slot
from headrace.tiers.connector import ConnectorCapabilities
from headrace.types.events import JobDone, LookupDone
from headrace.types.outputs import FinishReason
from headrace.types.plans import LoadJob

Make = Callable[..., Any]


class Store:
    """Has the first ``tokens`` tokens of everything; None makes it ask for patience."""

    capabilities = ConnectorCapabilities()

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.jobs: list[LoadJob] = []
        self.finished: list[str] = []

    def lookup(
        self, request_id: RequestId, hashes: Sequence[bytes], local_tokens: int, limit_tokens: int
    ) -> int | None:
        return None if self.tokens is None else max(0, min(self.tokens, limit_tokens) - local_tokens)

    def load_planned(self, job: LoadJob) -> None:
        self.jobs.append(job)

    def request_finished(self, request_id: RequestId) -> None:
        self.finished.append(request_id)


def make_store_bench(make_bench: Make, tokens: int | None, **config: Any) -> tuple[Any, Store]:
    store = Store(tokens)
    options = {"connector": store, "load_timeout_s": 5.0, "lookup_timeout_s": 2.0}
    return make_bench(options=options, **config), store


def test_a_load_holds_blocks_and_no_slot_and_is_followed_by_a_start(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 8)
    bench.add("a", 10)
    plan, _ = bench.step()
    (job,) = plan.loads
    assert (plan.starts, plan.rows, job.start_tokens, job.end_tokens) == ([], [], 0, 8)
    assert store.jobs == [job]
    assert bench.states() == {"a": "LOADING"}
    assert (bench.free_blocks, bench.scheduler.stats().waiting_load) == (62, 1)
    bench.post(JobDone(job.job_id, 8))
    plan, deltas = bench.step()
    (start,) = plan.starts
    assert (start.request_id, start.computed_tokens, start.blocks) == ("a", 8, job.blocks)
    assert [(row.start, row.tokens, row.sample) for row in plan.rows] == [(8, 2, True)]
    assert [append.slot for append in plan.appends] == [0]
    assert deltas[0].cached_tokens == 8
    stats = bench.scheduler.stats()
    assert (stats.waiting_load, stats.loaded_tokens, stats.prefix_hit_tokens) == (0, 8, 8)


def test_others_go_on_while_a_store_is_looking(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, None)
    bench.add("a", 10)
    bench.step()
    store.tokens = 0
    bench.add("b", 10)
    assert bench.chunks(bench.step()[0]) == {"b": 10}
    assert bench.states()["a"] == "LOOKUP"
    assert bench.scheduler.stats().waiting_lookup == 1
    bench.post(LookupDone(RequestId("a")))
    assert bench.chunks(bench.step()[0]) == {"b": 1, "a": 10}


def test_a_store_that_never_answers_costs_its_time_and_no_more(make_bench: Make) -> None:
    bench, _ = make_store_bench(make_bench, None)
    bench.add("a", 10)
    bench.step()
    assert bench.scheduler.next_event_s == 2.0
    assert bench.step()[0].rows == []
    assert bench.chunks(bench.step()[0]) == {"a": 10}


def test_a_load_that_takes_too_long_is_given_up_and_keeps_its_blocks(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 8)
    bench.add("a", 10, max_tokens=1)
    plan, _ = bench.step()
    bench.now_s = 5.0
    plan, _ = bench.step()
    (start,) = plan.starts
    assert (start.computed_tokens, set(start.blocks[0]) & set(store.jobs[0].blocks[0])) == (0, set())
    bench.step()
    assert bench.scheduler.running == []
    assert bench.scheduler.has_work, "the job is open"
    assert bench.free_blocks == 62
    bench.post(JobDone(store.jobs[0].job_id, 8))
    bench.step()
    assert (bench.free_blocks, bench.scheduler.has_work) == (64, False)
    assert bench.scheduler.stats().failed_loads == 1


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_blocks_of_a_load_outlive_its_request(make_bench: Make, end: str) -> None:
    bench, store = make_store_bench(make_bench, 8)
    bench.add("a", 10, **({"deadline_s": 1.0} if end == "deadline" else {}))
    bench.step()
    if end == "abort":
        bench.abort("a")
    _, deltas = bench.step()
    assert [delta.finish_reason for delta in deltas] == ([] if end == "abort" else [FinishReason.ERROR])
    assert (bench.free_blocks, bench.scheduler.waiting, store.finished) == (62, [], ["a"])
    bench.post(JobDone(store.jobs[0].job_id, 8))
    bench.step()
    assert (bench.free_blocks, bench.scheduler.has_work) == (64, False)


def test_a_part_that_arrives_is_an_ordinary_hit(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 8)
    bench.add("a", 10)
    bench.step()
    bench.post(JobDone(store.jobs[0].job_id, 4))
    plan, _ = bench.step()
    assert [(start.computed_tokens, plan.loads) for start in plan.starts] == [(4, [])]


def test_every_load_has_a_slot_in_view(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 8, max_num_seqs=2)
    for name in "abc":
        bench.add(name, 10)
    bench.add("d", 3)  # too short for a load
    plan, _ = bench.step()
    assert [job.request_id for job in plan.loads] == ["a", "b"]
    assert [start.request_id for start in plan.starts] == ["d"], "a free slot is not kept empty for a load"
    assert bench.states() == {"a": "LOADING", "b": "LOADING", "c": "LOOKUP", "d": "RUNNING"}
    for job in store.jobs[:2]:
        bench.post(JobDone(job.job_id, 8))
    plan, _ = bench.step()
    assert [start.request_id for start in plan.starts] == ["a"]
    assert bench.states()["b"] == "ARRIVED"
    bench.abort("d")
    plan, _ = bench.step()
    assert [start.request_id for start in plan.starts] == ["b"], "who holds blocks goes before the queue"
    assert bench.states()["c"] in ("WAITING", "LOOKUP")
    assert {delta.request_id for delta in bench_answering(bench, store, answered=2) if delta.finish_reason} >= {
        "a",
        "b",
        "c",
    }


def bench_answering(bench: Any, store: Store, *, answered: int) -> list[Any]:
    """Drain, with a store that answers every job but the first ones at once."""
    done, news = {job.job_id for job in store.jobs[:answered]}, []
    for _ in range(200):
        for job in store.jobs:
            if job.job_id not in done:
                done.add(job.job_id)
                bench.post(JobDone(job.job_id, job.end_tokens))
        if not bench.scheduler.has_work and not bench.inbox:
            break
        news += bench.step()[1]
    return news


def test_an_arrived_request_can_lose_its_blocks_and_start_again(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 8, max_num_seqs=2, policy="priority")
    bench.add("urgent", 3, priority=-1, max_tokens=10)
    bench.add("loads", 10, max_tokens=2)
    bench.step()
    bench.add("first", 3, priority=-2, max_tokens=10)
    bench.post(JobDone(store.jobs[0].job_id, 8))
    bench.now_s = 0.0
    # It arrives in the step in which its slot goes to somebody else.
    bench.scheduler._roster.free_slots.clear()
    bench.step()
    assert bench.states()["loads"] == "ARRIVED"
    pool = bench.scheduler.kv.memory.pools[0]
    taken = pool.allocate(bench.free_blocks)
    plan, _ = bench.step()
    assert bench.states()["loads"] == "PREEMPTED", "urgent opens its second block"
    assert (plan.releases, bench.chunks(plan)) == ([], {"urgent": 1})
    assert [request.preemptions for request in bench.scheduler.waiting if request.request_id == "loads"] == [1]
    pool.free(taken)
    bench.scheduler._roster.free_slots.append(Slot(1))
    news = bench_answering(bench, store, answered=1)
    ends = {delta.request_id for delta in news if delta.finish_reason is not None}
    assert ends == {"first", "loads", "urgent"}
    assert bench.free_blocks == 64


def test_a_load_needs_room_for_the_whole_prompt(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 4, usable_blocks=6)
    bench.add("a", 9, max_tokens=3)
    bench.add("b", 17, max_tokens=3)
    bench.step()
    assert bench.states() == {"a": "LOADING", "b": "WAITING"}, "b needs five blocks and a three"
    assert len(store.jobs) == 1


def test_an_outside_hit_beyond_the_local_one_goes_on_from_there(make_bench: Make) -> None:
    bench, store = make_store_bench(make_bench, 0)
    bench.add("a", list(range(9)), max_tokens=1)
    bench.step()
    store.tokens = 12
    bench.add("b", list(range(14)), max_tokens=1)
    plan, _ = bench.step()
    assert [(job.start_tokens, job.end_tokens) for job in plan.loads] == [(8, 12)]


def test_reports_of_nobody_change_nothing(make_bench: Make) -> None:
    bench, _ = make_store_bench(make_bench, 0)
    bench.post(JobDone(7, 3), LookupDone(RequestId("nobody")))
    bench.step()
    assert (bench.free_blocks, bench.scheduler.has_work) == (64, False)
    without = make_bench()
    without.post(JobDone(7, 3), LookupDone(RequestId("nobody")))
    without.step()
    assert not without.scheduler.has_work


def test_a_lookup_that_was_given_up_is_no_moment_to_wake_for(make_bench: Make) -> None:
    """An engine that sleeps until the next moment must not be told one that has passed, or it spins."""
    bench, _ = make_store_bench(make_bench, None, max_num_seqs=1)
    bench.add("first", 2, deadline_s=9.0)
    bench.step()
    bench.now_s = 1.0
    bench.add("second", 2)
    bench.step()
    bench.now_s = 2.0
    bench.step()
    assert bench.states() == {"first": "RUNNING", "second": "LOOKUP"}
    bench.now_s = 3.5
    bench.step()
    assert bench.states()["second"] == "WAITING"
    assert bench.scheduler.next_event_s == 9.0

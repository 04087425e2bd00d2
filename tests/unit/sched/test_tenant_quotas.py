"""A tenant over its quota is passed over, nobody behind it waits for that, and one request may always start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def started(plan: Any) -> list[str]:
    return [str(start.request_id) for start in plan.starts]


def test_a_request_over_the_quota_is_passed_over(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=16, tenant_quota=0.25)  # 4 blocks
    bench.add("a1", 8, tenant="a", max_tokens=4)
    bench.add("a2", 12, tenant="a", max_tokens=4)
    bench.add("b1", 8, tenant="b", max_tokens=4)
    plan, _ = bench.step()
    assert started(plan) == ["a1", "b1"]
    assert bench.states() == {"a1": "RUNNING", "b1": "RUNNING", "a2": "QUOTA"}
    stats = bench.scheduler.stats()
    assert (stats.waiting, stats.waiting_quota, stats.quota_skips) == (1, 1, 1)


def test_it_starts_when_its_tenant_gives_memory_back(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=16, tenant_quota=0.25)
    bench.add("a1", 8, tenant="a")
    bench.add("a2", 12, tenant="a")
    bench.step()
    assert started(bench.step()[0]) == []
    bench.abort("a1")
    assert started(bench.step()[0]) == ["a2"]


def test_two_fit_into_the_quota_exactly(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=16, tenant_quota=0.25)
    bench.add("a1", 8, tenant="a", max_tokens=2)
    bench.add("a2", 4, tenant="a", max_tokens=2)
    bench.add("a3", 1, tenant="a", max_tokens=2)
    assert started(bench.step()[0]) == ["a1", "a2"], "8 known tokens and one sampled are 3 blocks, 4 are 1"


def test_a_tenant_with_nothing_running_may_always_start_one(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=16, tenant_quota=0.0)
    bench.add("a1", 30, tenant="a")
    bench.add("a2", 1, tenant="a")
    assert started(bench.step()[0]) == ["a1"]
    assert bench.states()["a2"] == "QUOTA"


def test_requests_without_a_tenant_have_no_quota_and_one_is_off(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=16, tenant_quota=0.0)
    bench.add("x", 8)
    bench.add("y", 8)
    assert started(bench.step()[0]) == ["x", "y"]
    bench = make_bench(usable_blocks=16)
    bench.add("a1", 20, tenant="a", max_tokens=1)
    bench.add("a2", 20, tenant="a", max_tokens=1)
    assert started(bench.step()[0]) == ["a1", "a2"]


def test_a_preempted_request_over_its_quota_comes_back(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=5, tenant_quota=0.5)
    bench.add("a", 8, tenant="a", max_tokens=6)
    bench.add("b", 8, tenant="b", max_tokens=6)
    bench.step()
    bench.step()
    assert bench.states()["b"] == "PREEMPTED"
    assert {delta.request_id for delta in bench.drain() if delta.finish_reason is not None} == {"a", "b"}


def test_an_aborted_request_leaves_the_gate(make_bench: Make) -> None:
    bench = make_bench(tenant_quota=0.0)
    bench.add("a1", tenant="a")
    bench.add("a2", tenant="a")
    bench.step()
    bench.abort("a2")
    bench.abort("a1")
    bench.step()
    bench.step()
    assert not bench.scheduler.has_work

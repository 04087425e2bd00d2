"""Admission looks at future block use: the share that is reserved adapts, and stays between the two follies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.kv.budget import fixed_layout
from headrace.kv.coordinator import KvCoordinator
from headrace.sched.reserve import DECAY, FIRST_SHARE, HORIZON_TOKENS, LEAST_RAISED_SHARE, RAISE, FutureUse
from headrace.types.cache_specs import FullAttentionSpec, LayerCache, RecurrentSpec, SlidingWindowSpec, StatePart

Make = Callable[..., Any]


def make_future(**sizes: Any) -> FutureUse:
    layout = fixed_layout(
        [
            LayerCache(0, FullAttentionSpec(1, 4, 4, 2)),
            LayerCache(1, SlidingWindowSpec(1, 4, 4, 2, window_tokens=8)),
            LayerCache(2, RecurrentSpec((StatePart("state", (16,), 4),))),
        ],
        block_tokens=[4, 4, 0],
        usable_blocks=100,
    )
    kv = KvCoordinator(layout, enable_prefix_caching=True, batch_tokens=8)
    defaults = {"watermark": 0.0, "max_model_len": 10_000, "batch_tokens": 8, "in_flight": 1}
    return FutureUse(kv, layout.groups, **(defaults | sizes))


class Holder:
    """The four numbers of a request that matter here."""

    def __init__(self, known: int, limit: int) -> None:
        self.known_tokens, self.limit_tokens = known, limit
        self.kv = type("Kv", (), {"covered_tokens": known})()


def test_the_share_decays_while_nobody_is_preempted_and_jumps_when_somebody_is() -> None:
    future = make_future()
    assert future.share == FIRST_SHARE
    future.settle(preempted=False, running=True)
    assert future.share == FIRST_SHARE * DECAY
    future.settle(preempted=True, running=True)
    assert future.share == RAISE * FIRST_SHARE * DECAY
    for _ in range(9):
        future.settle(preempted=True, running=True)
    assert future.share == 1.0


def test_an_idle_engine_learns_nothing_and_a_small_share_ends_as_none() -> None:
    future = make_future()
    future.settle(preempted=False, running=False)
    assert future.share == FIRST_SHARE
    for _ in range(2000):
        future.settle(preempted=False, running=True)
    assert future.share == 0.0
    future.settle(preempted=True, running=True)
    assert future.share == LEAST_RAISED_SHARE


def test_groups_that_stop_growing_reserve_no_more_than_their_bound() -> None:
    future = make_future()
    # A window of 8 and batches of 8 need at most (7 + 8) tokens, rounded up, and a block more: 5 blocks, 20 tokens.
    assert future.growth_tokens(Holder(10, 100)) == [90, 10, 0]
    assert future.growth_tokens(Holder(50, 100)) == [50, 0, 0]


def test_nothing_is_reserved_beyond_the_horizon() -> None:
    assert make_future().growth_tokens(Holder(10, 9_000))[0] == HORIZON_TOKENS


def test_the_share_of_a_sum_is_given_in_whole_blocks() -> None:
    future = make_future()
    claims = future.claims([Holder(0, 16), Holder(4, 20)])
    assert claims.kept_blocks(Holder(2, 2)) == [2, 2, 0], "a quarter of 32 tokens is two blocks"
    assert claims.kept_blocks(Holder(2, 18)) == [3, 3, 0], "the newcomer's own future counts too"


def test_the_watermark_is_divided_among_the_groups() -> None:
    future = make_future(watermark=0.3)
    assert future.watermark_blocks == [30, 30, 30], "each could have all 300 blocks' extents"


def run_load(make_bench: Make, monkeypatch: pytest.MonkeyPatch, fixed_share: float | None) -> tuple[int, int]:
    """Run 60 requests of 8 prompt and 16 to 48 known tokens, limits of 68, on 40 blocks.

    Returns:
        Steps, and tokens computed more than once.
    """
    with monkeypatch.context() as patch:
        if fixed_share is not None:
            patch.setattr("headrace.sched.reserve.FIRST_SHARE", fixed_share)
            patch.setattr("headrace.sched.reserve.FutureUse.settle", lambda self, **given: None)
        bench = make_bench(usable_blocks=40, max_num_seqs=32, caching=False)
        lengths = {f"r{number}": 16 + number * 7 % 33 for number in range(60)}
        for name in lengths:
            bench.add(name, 8, max_tokens=60, stop_token_ids=[9])
        steps = computed_tokens = 0
        while bench.scheduler.has_work or bench.inbox:
            plan = bench.schedule()
            ending = [item for item in bench.scheduler.running if len(item.token_ids) + 1 >= lengths[item.request_id]]
            bench.apply(plan, {str(request.request_id): 9 for request in ending})
            steps += 1
            computed_tokens += plan.total_tokens
    return steps, computed_tokens - sum(lengths.values()) + len(lengths)


def test_it_neither_thrashes_nor_wastes_memory(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy_steps, greedy_wasted = run_load(make_bench, monkeypatch, 0.0)
    timid_steps, timid_wasted = run_load(make_bench, monkeypatch, 1.0)
    steps, wasted = run_load(make_bench, monkeypatch, None)
    assert timid_wasted == 0, "with all of max_tokens reserved nobody is preempted"
    assert 0 < wasted < 0.4 * greedy_wasted, "without a reserve work is done twice"
    assert steps < 0.5 * timid_steps, "with all of it few run at once"
    assert steps < 1.25 * greedy_steps


def test_a_request_that_fits_only_alone_starts_when_nothing_runs(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=8, watermark=0.25)
    bench.add("alone", 31, max_tokens=1)
    bench.add("next", 5, max_tokens=20)
    assert bench.chunks(bench.step()[0]) == {"alone": 31}
    assert bench.chunks(bench.step()[0]) == {"next": 5}

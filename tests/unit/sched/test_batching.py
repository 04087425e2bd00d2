"""Which tokens a step computes: budget, chunks, order, hits, slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import ConfigError, InvariantError
from headrace.types.events import ResetPrefixCache
from headrace.types.results import StepResult

Make = Callable[..., Any]


def test_chunk_vector_of_one_decode_and_two_prompts(make_bench: Make) -> None:
    # engine.md section 5: R decodes, P=10, Q=3, budget 6.
    bench = make_bench(max_num_batched_tokens=6)
    bench.add("R", 3)
    bench.step()
    bench.add("P", 10)
    bench.add("Q", 3)
    assert bench.chunks(bench.step()[0]) == {"R": 1, "P": 5}
    assert bench.chunks(bench.step()[0]) == {"R": 1, "P": 5}
    assert bench.chunks(bench.step()[0]) == {"R": 1, "P": 1, "Q": 3}


def test_only_the_last_chunk_samples(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=4)
    bench.add("a", 10)
    seen = [bench.step() for _ in range(4)]
    rows = [(row.start, row.tokens, row.sample) for plan, _ in seen for row in plan.rows]
    assert rows == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert [plan.decodes for plan, _ in seen] == [[], [], [], [0]]
    assert [len(deltas) for _, deltas in seen] == [0, 0, 1, 1]


def test_long_prefill_threshold_leaves_room_for_others(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    bench.add("long", 20)
    bench.add("short", 5)
    assert bench.chunks(bench.step()[0]) == {"long": 6, "short": 5}
    assert bench.chunks(bench.step()[0]) == {"short": 1, "long": 6}


def test_decodes_go_before_chunks_that_are_older(make_bench: Make) -> None:
    bench = make_bench(max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_seqs=4)
    bench.add("long", 30)
    bench.add("short", 4)
    bench.step()
    plan, _ = bench.step()
    assert list(bench.chunks(plan)) == ["short", "long"]


def test_slots_limit_what_runs(make_bench: Make) -> None:
    bench = make_bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name)
    plan, _ = bench.step()
    assert [start.slot for start in plan.starts] == [0, 1]
    assert bench.scheduler.stats().waiting == 1


def test_a_start_carries_what_the_worker_needs_and_is_not_shared(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", [1, 2, 3, 4, 5], eos_token_ids=[7], bad_words_token_ids=[[8, 9]])
    plan, _ = bench.step()
    (start,) = plan.starts
    assert (list(start.token_ids), start.prompt_tokens, start.computed_tokens) == ([1, 2, 3, 4, 5], 5, 0)
    assert (start.eos_token_ids, start.bad_words_token_ids) == ([7], [[8, 9]])
    assert [len(table) for table in start.blocks] == [2]
    before = [list(start.token_ids), [list(table) for table in start.blocks]]
    for _ in range(5):
        bench.step()
    assert [list(start.token_ids), start.blocks] == before


def test_blocks_are_appended_when_a_token_needs_one(make_bench: Make) -> None:
    bench = make_bench(block_tokens=4)
    bench.add("a", 3)
    appends = [[len(item.blocks[0]) for item in bench.step()[0].appends] for _ in range(7)]
    # Positions 0..2, then 3 in the first block, 4 opens the second, 8 the third.
    assert appends == [[], [], [1], [], [], [], [1]]


def test_a_full_prefix_hit_computes_one_token(make_bench: Make) -> None:
    bench = make_bench(block_tokens=4)
    prompt = list(range(13))
    bench.add("a", prompt)
    bench.step()
    bench.add("b", prompt)
    plan, deltas = bench.step()
    (start,) = plan.starts
    assert start.computed_tokens == 12
    assert bench.chunks(plan) == {"a": 1, "b": 1}
    assert {delta.request_id: delta.cached_tokens for delta in deltas}["b"] == 12
    stats = bench.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prompt_tokens) == (26, 12, 26)


def test_a_shared_block_is_never_written_even_if_it_means_a_block_of_work(make_bench: Make) -> None:
    bench = make_bench(block_tokens=4)
    bench.add("a", list(range(12)))
    bench.step()
    bench.add("b", list(range(12)))
    assert bench.schedule().starts[0].computed_tokens == 8


def test_tokens_are_hittable_only_after_their_step_is_applied(make_bench: Make) -> None:
    bench = make_bench(block_tokens=4, steps_in_flight=2)
    bench.add("a", list(range(13)))
    first = bench.schedule()
    bench.add("b", list(range(13)))
    second = bench.schedule()
    assert second.starts[0].computed_tokens == 0
    bench.apply(first)
    bench.add("c", list(range(13)))
    assert bench.schedule().starts[0].computed_tokens == 12


def test_salts_and_disabled_caching_give_no_hits(make_bench: Make) -> None:
    for caching, salt in ((True, "tenant"), (False, None)):
        bench = make_bench(caching=caching)
        bench.add("a", list(range(13)))
        bench.step()
        bench.add("b", list(range(13)), cache_salt=salt)
        assert bench.schedule().starts[0].computed_tokens == 0


def test_prompt_logprobs_take_no_hits(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", list(range(13)))
    bench.step()
    bench.add("b", list(range(13)), prompt_logprobs=1)
    assert bench.schedule().starts[0].computed_tokens == 0


def test_reset_forgets_what_nobody_uses(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", list(range(13)), max_tokens=1)
    bench.step()
    assert bench.scheduler.stats().blocks_cached == 3
    bench.inbox.append(ResetPrefixCache())
    bench.add("b", list(range(13)))
    assert bench.schedule().starts[0].computed_tokens == 0


def test_priority_orders_the_queue_and_ties_go_by_arrival(make_bench: Make) -> None:
    bench = make_bench(max_num_seqs=1, policy="priority")
    bench.add("late", priority=1, arrival_s=2.0)
    bench.add("early", priority=1, arrival_s=1.0)
    bench.add("urgent", priority=-1, arrival_s=3.0)
    bench.schedule()
    assert [item.request_id for item in bench.scheduler.running] == ["urgent"]
    assert [item.request_id for item in bench.scheduler.waiting] == ["early", "late"]


def test_fcfs_ignores_priority(make_bench: Make) -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add("first", priority=5)
    bench.add("second", priority=-5)
    bench.schedule()
    assert [item.request_id for item in bench.scheduler.running] == ["first"]


def test_the_watermark_holds_back_only_beside_running_requests(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=8, watermark=0.25)  # 2 of 8 blocks stay free
    bench.add("alone", 29, max_tokens=2)
    bench.add("small", 1, max_tokens=2)
    plan, _ = bench.step()
    assert [start.request_id for start in plan.starts] == ["alone"], "8 of 8 blocks: nothing else runs"
    bench.step()
    bench.add("other", 20, max_tokens=2)
    plan, _ = bench.step()
    assert [start.request_id for start in plan.starts] == ["small", "other"], "1 + 5 blocks leave 2"


def test_a_prompt_half_computed_keeps_its_promise_of_blocks(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=8, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    bench.add("long", 24, max_tokens=2)  # 6 blocks, 1 of them now
    bench.add("b", 12, max_tokens=2)  # 3 of the 7 free blocks would do, but 5 are promised
    assert bench.chunks(bench.step()[0]) == {"long": 4}


def test_a_blocked_head_is_looked_up_once(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(usable_blocks=8)
    kv, lookups = bench.scheduler.kv, []
    find_hit = kv.find_hit
    monkeypatch.setattr(kv, "find_hit", lambda *given: lookups.append(given[0]) or find_hit(*given))
    bench.add("a", 13, max_tokens=3)
    bench.step()
    bench.add("waits", 25, max_tokens=2)
    lookups.clear()
    bench.step()
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"a": 1}
    assert len(lookups) == 1, "nothing it needs has changed in between"
    assert bench.chunks(bench.step()[0]) == {"waits": 25}
    assert len(lookups) == 2, "a has ended and its blocks are free"


def test_a_blocked_head_starts_as_soon_as_what_it_shares_is_published(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=6, long_prefill_token_threshold=8)
    shared = list(range(16))
    bench.add("a", shared, max_tokens=4)  # 4 blocks for the prompt, two steps; one more at its end
    bench.step()
    bench.add("b", [*shared, 99], max_tokens=2)  # 5 blocks, of which 4 will be shared
    assert bench.chunks(bench.step()[0]) == {"a": 8}, "2 blocks are free and 2 published ones are not enough"
    assert bench.chunks(bench.step()[0]) == {"a": 1, "b": 1}


def test_a_new_head_is_looked_up_and_the_old_one_again(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=8, policy="priority")
    bench.add("a", 13, max_tokens=9)
    bench.step()
    bench.add("long", 25, max_tokens=2)
    bench.step()
    bench.add("urgent", 4, max_tokens=1, priority=-1)
    assert bench.chunks(bench.step()[0]) == {"a": 1, "urgent": 4}
    bench.abort("a")
    assert bench.chunks(bench.step()[0]) == {"long": 25}


def test_plain_decodes_are_columns_and_everything_else_is_a_row(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", 3, seed=5, presence_penalty=1.0)
    bench.add("b", 3, logprobs=0)
    bench.add("c", 3, prompt_logprobs=0)
    plan, deltas = bench.step()
    assert (plan.decodes, len(plan.rows)) == ([], 3), "a start is a row"
    assert [delta.first_scheduled_s for delta in deltas] == [0.0] * 3
    plan = bench.schedule()
    assert (plan.decodes, [row.request_id for row in plan.rows]) == ([0], ["b", "c"])
    bench.apply(plan, {"a": 7})
    assert (bench.news.request_ids, bench.news.token_ids) == (["a"], [7])
    assert [delta.request_id for delta in bench.news.deltas] == ["b", "c"]
    assert bench.scheduler.stats().generation_tokens == 6


def test_a_decode_with_more_news_than_a_token_is_a_delta(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", 3, max_tokens=2)
    bench.add("b", 3)
    bench.step()
    plan, _ = bench.step()
    assert plan.decodes == [0, 1]
    assert (bench.news.request_ids, [delta.request_id for delta in bench.news.deltas]) == (["b"], ["a"])


def test_the_first_news_of_a_request_are_a_delta_even_if_they_come_from_a_decode(make_bench: Make) -> None:
    bench = make_bench(long_prefill_token_threshold=2)
    bench.add("a", 3)
    bench.step()
    plan, (delta,) = bench.step()
    assert (plan.decodes, delta.first_scheduled_s, bench.news.request_ids) == ([0], 0.0, [])


def test_planned_ids_are_those_of_all_plans_in_flight(make_bench: Make) -> None:
    bench = make_bench(steps_in_flight=2)
    bench.add("a", 3)
    first = bench.schedule()
    bench.add("b", 3)
    second = bench.schedule()
    assert sorted(bench.scheduler.planned_ids()) == ["a", "a", "b"]
    bench.apply(first)
    assert sorted(bench.scheduler.planned_ids()) == ["a", "b"]
    bench.apply(second)
    assert bench.scheduler.planned_ids() == []


def test_idle_steps_are_legal(make_bench: Make) -> None:
    bench = make_bench()
    assert not bench.scheduler.has_work
    plan, deltas = bench.step()
    assert (plan.total_tokens, plan.starts, plan.releases, deltas) == (0, [], [], [])


def test_limits_that_starve_and_unknown_policies_are_refused(make_bench: Make) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        make_bench(max_num_seqs=8, max_num_batched_tokens=7)
    with pytest.raises(ConfigError, match="policy"):
        make_bench(policy="lifo")


def test_misuse_by_the_caller_is_named(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a")
    plan = bench.schedule()
    with pytest.raises(InvariantError, match="too many plans"):
        bench.schedule()
    with pytest.raises(InvariantError, match=r"results for \(0, 0\) rows and decodes in place of \(1, 0\)"):
        bench.scheduler.apply(plan, StepResult(plan.step, []), 0.0)


def test_results_out_of_order_are_refused(make_bench: Make) -> None:
    bench = make_bench(steps_in_flight=2)
    bench.add("a")
    bench.schedule()
    second = bench.schedule()
    with pytest.raises(InvariantError, match="not the oldest"):
        bench.apply(second)


def test_stats_count_blocks_tokens_and_seconds(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=10)
    bench.add("a", 5)
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.blocks_total, stats.blocks_free, stats.blocks_cached) == (10, 8, 1)
    assert (stats.step, stats.step_tokens, stats.step_s, stats.generation_tokens) == (1, 5, 1.0, 1)

"""Speculation: how many drafts a row carries, what its result means, and what is rolled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import ConfigError, InvariantError
from headrace.base.ids import RequestId
from headrace.kv.budget import fixed_layout
from headrace.types.cache_specs import FullAttentionSpec, LayerCache, RecurrentSpec, StatePart
from headrace.types.events import GrammarReady
from headrace.types.outputs import FinishReason
from headrace.types.results import RowResult, TokenLogprobs

Make = Callable[..., Any]


def rows(plan: Any) -> list[tuple[int, int, int, bool]]:
    return [(row.start, row.tokens, row.drafts, row.sample) for row in plan.rows]


def test_the_vector_of_a_prompt_in_chunks_without_drafts(make_bench: Make) -> None:
    # engine.md section 5: prompt 80, budget 50, K=3 -> 50, 30, 1+3.
    bench = make_bench(max_num_batched_tokens=50, speculative_tokens=3)
    bench.add("a", 80)
    assert [rows(bench.step()[0]) for _ in range(2)] == [[(0, 50, 0, False)], [(50, 30, 0, True)]]
    assert rows(bench.schedule()) == [(80, 4, 3, True)]


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_what_holds_is_progress_and_the_rest_is_void(make_bench: Make, samples: int) -> None:
    bench = make_bench(speculative_tokens=2)
    bench.add("a", 4)
    bench.step()
    plan = bench.schedule()
    (delta,) = bench.apply(plan, a=RowResult(list(range(50, 50 + samples))))
    assert delta.new_token_ids == list(range(50, 50 + samples))
    (request,) = bench.scheduler.running
    assert (len(request.token_ids), request.known_tokens) == (5 + samples, 5 + samples)
    assert (request.planned_tokens, request.computed_tokens) == (4 + samples, 4 + samples)
    assert rows(bench.schedule()) == [(4 + samples, 3, 2, True)]
    stats = bench.scheduler.stats()
    assert (stats.draft_tokens, stats.accepted_tokens, stats.generation_tokens) == (2, samples - 1, 1 + samples)


def test_a_row_with_drafts_in_flight_is_not_planned_again(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=2, steps_in_flight=2)
    bench.add("a", 4)
    bench.apply(bench.schedule())
    first = bench.schedule()
    second = bench.schedule()
    assert (len(first.rows), second.rows, second.decodes) == (1, [], [])
    bench.apply(first, a=RowResult([7, 8]))
    bench.apply(second)
    assert rows(bench.schedule()) == [(6, 3, 2, True)]


def test_blocks_are_reserved_for_the_drafts_and_only_if_they_are_free(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=3, usable_blocks=3)
    bench.add("a", 7, max_tokens=5)
    bench.step()
    plan = bench.schedule()
    assert rows(plan) == [(7, 4, 3, True)]
    assert [len(append.blocks[0]) for append in plan.appends] == [1]
    bench = make_bench(speculative_tokens=3, usable_blocks=2)
    bench.add("a", 6, max_tokens=2)
    bench.scheduler.kv.memory.pools[0].allocate(0)
    bench.step()
    assert rows(bench.schedule()) == [(6, 1, 0, True)], "at its limit a single token is left"
    bench = make_bench(speculative_tokens=3, usable_blocks=3)
    bench.add("a", 7, max_tokens=5)
    bench.step()
    bench.scheduler.kv.memory.pools[0].allocate(1)
    assert rows(bench.schedule()) == [(7, 1, 0, True)], "guesses take no block from anybody"


def test_no_draft_beyond_the_limit(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=4)
    bench.add("a", 4, max_tokens=4)
    bench.step()
    plan = bench.schedule()
    assert rows(plan) == [(4, 3, 2, True)], "three outputs are left: two drafts and what follows them"
    (delta,) = bench.apply(plan, a=RowResult([7, 8, 9]))
    assert delta.finish_reason is FinishReason.LENGTH
    assert bench.scheduler.running == []


def test_no_draft_while_masks_depend_on_earlier_samples(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=2)
    bench.add("a", 4, min_tokens=3)
    bench.add("g", 4, grammar="g")
    bench.post(GrammarReady(RequestId("g")))
    seen = [[row.drafts for row in bench.step()[0].rows] for _ in range(4)]
    assert seen == [[0, 0], [0, 0], [0, 0], [2, 0]]


def test_a_stop_token_among_the_samples_ends_the_request_there(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=3)
    bench.add("a", 4, stop_token_ids=[9], logprobs=0)
    entries = [TokenLogprobs(token, -1.0, 1, [], []) for token in (7, 9, 8, 6)]
    bench.apply(bench.schedule(), a=RowResult([5], logprobs=entries[:1]))
    (delta,) = bench.apply(bench.schedule(), a=RowResult([7, 9, 8, 6], logprobs=entries))
    assert (delta.new_token_ids, delta.finish_reason, delta.stop_token_id) == ([7, 9], FinishReason.STOP, 9)
    assert delta.logprobs == entries[:2]
    assert bench.scheduler.stats().generation_tokens == 3


def test_drafted_tokens_are_published_only_when_they_hold(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=3, block_tokens=4)
    bench.add("a", 4)
    bench.step()
    plan = bench.schedule()
    assert bench.scheduler.stats().blocks_cached == 1
    bench.apply(plan, a=RowResult([7, 8, 9]))
    assert bench.scheduler.stats().blocks_cached == 1, "positions 4 to 6 hold, 7 does not"
    bench.apply(bench.schedule(), a=RowResult([5]))
    assert bench.scheduler.stats().blocks_cached == 2


def test_a_preempted_request_takes_the_samples_of_its_drafts(make_bench: Make) -> None:
    bench = make_bench(speculative_tokens=2, steps_in_flight=2, usable_blocks=5, policy="priority")
    bench.add("late", 6, priority=1, max_tokens=8)
    bench.apply(bench.schedule())
    bench.add("urgent", 7, max_tokens=8)
    first = bench.schedule()
    assert [(row.request_id, row.drafts) for row in first.rows] == [("late", 2), ("urgent", 0)]
    bench.scheduler.kv.memory.pools[0].allocate(bench.free_blocks)
    second = bench.schedule()
    bench.apply(first, late=RowResult([7, 8]))
    third = bench.schedule()
    assert [request.request_id for request in bench.scheduler.waiting] == ["late"]
    (late,) = bench.scheduler.waiting
    assert (len(late.token_ids), late.known_tokens, late.planned_tokens) == (9, 9, 0)
    bench.apply(second)
    bench.apply(third)


def test_every_decode_keeps_its_token_of_the_budget(make_bench: Make) -> None:
    with pytest.raises(ConfigError, match="below the 12 that max_num_seqs 4 decodes of 3 tokens"):
        make_bench(speculative_tokens=2, max_num_batched_tokens=11)
    bench = make_bench(speculative_tokens=2, max_num_batched_tokens=12)
    for name in "abcd":
        bench.add(name, 3)
    bench.step()
    assert [row.tokens for row in bench.schedule().rows] == [3, 3, 3, 3]


def test_recurrent_states_cannot_be_rolled_back(make_bench: Make) -> None:
    layers = [
        LayerCache(0, FullAttentionSpec(1, 4, 4, 2)),
        LayerCache(1, RecurrentSpec((StatePart("state", (16,), 4),))),
    ]
    layout = fixed_layout(layers, block_tokens=[4, 0], usable_blocks=16)
    with pytest.raises(ConfigError, match="recurrent state"):
        make_bench(layout=layout, speculative_tokens=1)


@pytest.mark.parametrize("samples", [0, 4])
def test_a_wrong_number_of_samples_is_a_bug_of_the_worker(make_bench: Make, samples: int) -> None:
    bench = make_bench(speculative_tokens=2)
    bench.add("a", 4)
    bench.step()
    with pytest.raises(InvariantError, match=f"{samples} tokens sampled where 1 to 3"):
        bench.apply(bench.schedule(), a=RowResult([1] * samples))

"""The victim is the cheapest to compute again among those later in order; the first is never one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.kv.budget import fixed_layout
from headrace.kv.coordinator import KvCoordinator
from headrace.sched.victims import choose_victim, recompute_tokens, useful_granules
from headrace.types.cache_specs import FullAttentionSpec, LayerCache

Make = Callable[..., Any]


class Holder:
    """A request with blocks."""

    def __init__(self, kv: KvCoordinator, place: float, token_ids: list[int]) -> None:
        self.order_key = (place, 0)
        self.planned_tokens = len(token_ids)
        self.kv = kv.new_sequence(prompt_tokens=len(token_ids))
        kv.start(self.kv, kv.find_hit(self.kv, token_ids), len(token_ids))
        kv.advance(self.kv, token_ids, len(token_ids))


def make_kv() -> KvCoordinator:
    layout = fixed_layout([LayerCache(0, FullAttentionSpec(1, 4, 4, 2))], block_tokens=4, usable_blocks=64)
    return KvCoordinator(layout, enable_prefix_caching=True, batch_tokens=64)


def test_the_fewest_tokens_to_compute_again_go() -> None:
    kv = make_kv()
    first, long, short, middle = (
        Holder(kv, place, list(range(100 * place, 100 * place + tokens))) for place, tokens in enumerate((8, 40, 9, 20))
    )
    everybody = [first, long, short, middle]
    assert choose_victim(first, everybody, [1], kv) is short
    assert choose_victim(short, everybody, [1], kv) is middle, "only who is later in order"
    assert choose_victim(middle, everybody, [1], kv) is None


def test_what_helps_counts_and_no_more() -> None:
    kv = make_kv()
    first = Holder(kv, 0, list(range(8)))
    small = Holder(kv, 1, list(range(100, 104)))
    large = Holder(kv, 2, list(range(200, 220)))
    assert choose_victim(first, [first, small, large], [1], kv) is small
    # Five blocks are missing: one victim of 20 tokens costs as much a block as five of 4 would; the last goes.
    assert choose_victim(first, [first, small, large], [5], kv) is large
    assert useful_granules(large, [2], kv) == 2
    assert useful_granules(large, [9], kv) == 5


def test_a_shared_beginning_costs_nothing_and_gives_nothing() -> None:
    kv = make_kv()
    shared = list(range(16))
    first = Holder(kv, 0, [*shared, 50])
    sharing = Holder(kv, 1, [*shared, 60, 61, 62])
    alone = Holder(kv, 2, list(range(100, 106)))
    assert (recompute_tokens(sharing, kv), recompute_tokens(alone, kv)) == (3, 6)
    assert useful_granules(sharing, [3], kv) == 1
    assert choose_victim(first, [first, sharing, alone], [1], kv) is sharing


def test_among_equals_the_last_in_order_goes() -> None:
    kv = make_kv()
    holders = [Holder(kv, place, list(range(100 * place, 100 * place + 8))) for place in range(4)]
    assert choose_victim(holders[0], holders, [1], kv) is holders[3]
    assert choose_victim(holders[0], holders[::-1], [1], kv) is holders[3]


def test_those_who_share_everything_go_last_but_they_go() -> None:
    kv = make_kv()
    first = Holder(kv, 0, list(range(8)))
    twins = [Holder(kv, place, [*range(100, 108), 7]) for place in (1, 2)]
    for twin in twins:
        # Take the private tail away: only the shared blocks are left.
        kv.memory.pools[0].free(twin.kv.tables[0][2:])
        del twin.kv.tables[0][2:]
    own = Holder(kv, 1.5, list(range(200, 240)))
    assert choose_victim(first, [first, *twins, own], [1], kv) is own
    assert choose_victim(first, [first, *twins], [1], kv) is twins[1]


def test_the_scheduler_takes_the_cheap_one_and_the_first_goes_on(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=8)
    bench.add("first", 8, max_tokens=6)
    bench.add("cheap", 2, max_tokens=4)
    bench.add("dear", 14, max_tokens=2)
    bench.step()
    assert bench.free_blocks == 1
    bench.scheduler.kv.memory.pools[0].allocate(1)  # somebody else's
    plan, _ = bench.step()
    assert bench.chunks(plan) == {"first": 1, "dear": 1}
    assert [request.request_id for request in bench.scheduler.waiting] == ["cheap"]


def test_nobody_takes_from_an_earlier_one(make_bench: Make) -> None:
    bench = make_bench(usable_blocks=5)
    bench.add("cheap", 2, max_tokens=3)
    bench.add("needy", 7, max_tokens=6)
    bench.add("last", 6, max_tokens=3)
    bench.step()
    assert bench.free_blocks == 0
    bench.step()
    plan, _ = bench.step()  # needy opens its third block
    assert bench.chunks(plan) == {"cheap": 1, "needy": 1}
    assert [request.request_id for request in bench.scheduler.waiting] == ["last"]

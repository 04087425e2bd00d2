import pytest

from headrace.base.errors import ConfigError
from headrace.kv.budget import fixed_layout
from headrace.kv.eviction import POLICIES, CostAware, EvictionPolicy, Inflation, LeastRecentlyUsed, make_policy
from headrace.kv.memory import KvMemory
from headrace.types.cache_specs import FullAttentionSpec, LayerCache


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param, Inflation(), 2.0)


def test_what_became_idle_first_goes_first(policy: EvictionPolicy) -> None:
    policy.add([3, 2])
    policy.add([1])
    assert (list(policy), policy.first(2), len(policy)) == ([3, 2, 1], [3, 2], 3)
    assert policy.take(2) == [3, 2]
    assert (list(policy), 1 in policy, 3 in policy) == ([1], True, False)


def test_what_is_used_again_is_idle_no_more(policy: EvictionPolicy) -> None:
    policy.add([1, 2, 3])
    policy.remove([2])
    assert policy.take(2) == [1, 3]
    policy.add([2])
    assert policy.first(9) == [2]


def test_a_chosen_victim_is_gone(policy: EvictionPolicy) -> None:
    policy.add([1, 2, 3])
    policy.evict(2)
    assert policy.take(2) == [1, 3]


def test_ranks_rise_in_the_order_of_eviction_over_all_pools() -> None:
    clock = Inflation()
    first, second = LeastRecentlyUsed(clock), LeastRecentlyUsed(clock)
    assert first.add([1]) < second.add([7]) < first.add([2])
    assert first.rank(1) < second.rank(7) < first.rank(2)


def test_reuse_and_cost_keep_a_block_longer() -> None:
    clock = Inflation()
    cheap, dear = CostAware(clock, 1.0), CostAware(clock, 10.0)
    cheap.used([1, 1, 1])
    cheap.add([1, 2])
    dear.add([5])
    assert cheap.first(2) == [2, 1]
    assert cheap.rank(2) < cheap.rank(1) < dear.rank(5)


def test_the_clock_lets_old_merit_be_overtaken() -> None:
    policy = CostAware(Inflation(), 1.0)
    policy.used([1] * 5)
    policy.add([1])
    evictions = 0
    for block in range(2, 50):
        policy.add([block])
        victim = policy.take(1)[0]
        evictions += 1
        if victim == 1:
            break
    assert 3 <= evictions <= 8


def test_merit_ends_with_the_content() -> None:
    policy = CostAware(Inflation(), 1.0)
    policy.used([1] * 9)
    policy.dropped([1])
    policy.add([1, 2])
    assert policy.first(1) == [1]


def test_entries_of_the_past_do_not_pile_up() -> None:
    policy = CostAware(Inflation(), 1.0)
    for _ in range(1000):
        policy.add([1, 2])
        policy.remove([1, 2])
    policy.add([1])
    assert len(policy._heap) < 200
    assert policy.take(1) == [1]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lru, cost"):
        make_policy("fifo", Inflation(), 1.0)


@pytest.mark.parametrize(("eviction", "kept"), [("lru", b"late"), ("cost", b"used")])
def test_a_pool_evicts_by_its_policy(eviction: str, kept: bytes) -> None:
    layout = fixed_layout([LayerCache(0, FullAttentionSpec(1, 8, 8, 2))], block_tokens=4, usable_blocks=2)
    pool = KvMemory(layout, eviction=eviction).pools[0]
    table = pool.allocate(2)
    for block, name in zip(table, (b"used", b"late"), strict=True):
        pool.publish(block, name, parent_hash=None, token_ids=[0])
    for _ in range(3):
        pool.touch(table[:1])
        pool.free(table[:1])
    pool.free(table[:1])
    pool.free(table[1:])
    pool.allocate(1)
    assert pool.cached_hashes() == {kept}

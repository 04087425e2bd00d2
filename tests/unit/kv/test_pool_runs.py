"""Looking up a run of hashes equals looking up each of them, whatever is cached, however often, in use or not."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.base.ids import BlockId
from headrace.kv import pool as pool_module
from headrace.kv.budget import fixed_layout
from headrace.kv.memory import KvMemory
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import FullAttentionSpec, LayerCache


def make_pool(usable: int) -> BlockPool:
    layout = fixed_layout([LayerCache(0, FullAttentionSpec(1, 4, 4, 2))], block_tokens=4, usable_blocks=usable)
    return KvMemory(layout).pools[0]


def one_by_one(pool: BlockPool, hashes: list[bytes]) -> list[BlockId | None]:
    return list(itertools.takewhile(lambda block: block is not None, map(pool.find, hashes)))


def test_a_run_ends_at_the_first_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_RUN_HASHES", 3)
    pool = make_pool(10)
    table = pool.allocate(8)
    names = [bytes([place]) for place in range(8)]
    for block, name in zip(table, names, strict=True):
        pool.publish(block, name)
    for missing in range(8):
        wanted = [*names[:missing], b"missing", *names[missing:]]
        assert pool.find_run(wanted) == table[:missing]
    assert pool.find_run(names) == table
    assert pool.find_run([]) == []


def test_of_several_blocks_of_a_hash_one_in_use_is_found_first() -> None:
    pool = make_pool(6)
    idle, used, late = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    for blocks in (idle, used, late):
        pool.publish(blocks[0], b"same")
    pool.free(idle)
    assert pool.find(b"same") == used[0]
    assert pool.find_run([b"same"]) == used
    pool.free(used)
    assert pool.find(b"same") == late[0]
    pool.free(late)
    assert pool.find(b"same") in [*idle, *used, *late]


def test_random_histories() -> None:
    rng = random.Random(5)
    for _ in range(60):
        pool, owned = make_pool(12), []
        for _ in range(40):
            if pool.free_blocks and rng.random() < 0.6:
                (block,) = pool.allocate(1)
                owned.append(block)
                if rng.random() < 0.9:
                    pool.publish(block, bytes([rng.randrange(6)]))
            elif owned:
                block = owned.pop(rng.randrange(len(owned)))
                if rng.random() < 0.2:
                    pool.retract(block, 0)
                pool.free([block])
            if rng.random() < 0.1:
                pool.forget(bytes([rng.randrange(6)]))
            wanted = [bytes([rng.randrange(6)]) for _ in range(4)]
            assert pool.find_run(wanted) == one_by_one(pool, wanted)
            holders = {name for block in pool.block_ids() for name in pool.hashes_of(block)}
            assert pool.cached_hashes() == holders
            for name in holders:
                assert name in pool.hashes_of(pool.find(name) or BlockId(0))

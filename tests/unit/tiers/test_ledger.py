"""A job owns its blocks from issue to report: whoever asked for it may be gone, the blocks are not free."""

import pytest

from headrace.base.errors import InvariantError
from headrace.kv.memory import KvMemory
from headrace.kv.pool import BlockPool
from headrace.tiers.connector import ConnectorCapabilities
from headrace.tiers.ledger import JobLedger
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout, KvLayout
from headrace.types.plans import LoadJob

SPEC = FullAttentionSpec(1, 8, 8, 2)


def _job(job_id: int, *blocks: list[int]) -> LoadJob:
    return LoadJob(job_id, "r", 0, 8, list(blocks), [])


@pytest.fixture
def pools() -> list[BlockPool]:
    layouts = [KvLayout([GroupLayout(0, SPEC, [layer], 4, 9)], SPEC.block_bytes(4), 8, 1) for layer in (0, 1)]
    return [KvMemory(layout).pools[0] for layout in layouts]


def test_capabilities_default_to_no() -> None:
    assert not ConnectorCapabilities().divergent_hits


def test_a_job_keeps_its_blocks_after_their_owner_left(pools) -> None:
    ledger = JobLedger(pools)
    owned = [pools[0].allocate(2), pools[1].allocate(1)]
    job = _job(ledger.new_id(), [0, *owned[0], owned[0][0]], owned[1])
    ledger.open(job, 9.0)
    assert [pools[0].references(block) for block in owned[0]] == [2, 2]
    assert ledger.held_blocks(0) == set(owned[0])
    assert ledger.held_blocks(1) == set(owned[1])
    for pool, blocks in zip(pools, owned, strict=True):
        pool.free(blocks)
    assert (pools[0].free_blocks, pools[1].free_blocks) == (pools[0].total_blocks - 2, pools[1].total_blocks - 1)
    assert ledger.close(job.job_id) is job
    assert all(pool.free_blocks == pool.total_blocks for pool in pools)
    assert len(ledger) == 0
    assert ledger.held_blocks(0) == set()


def test_the_report_of_a_job_touches_that_job_alone(pools) -> None:
    ledger = JobLedger(pools)
    blocks = pools[0].allocate(3)
    first, second = _job(ledger.new_id(), blocks[:2], []), _job(ledger.new_id(), blocks[1:], [])
    ledger.open(first, 1.0)
    ledger.open(second, 2.0)
    pools[0].free(blocks)
    ledger.close(first.job_id)
    assert [pools[0].references(block) for block in blocks] == [0, 1, 1]
    assert [entry.job for entry in ledger.jobs] == [second]
    assert ledger.jobs[0].deadline_s == 2.0


def test_unknown_and_repeated_reports_change_nothing(pools) -> None:
    ledger = JobLedger(pools)
    blocks = pools[0].allocate(1)
    job = _job(ledger.new_id(), blocks, [])
    assert ledger.close(job.job_id) is None
    assert ledger.close(77) is None
    ledger.open(job, 1.0)
    assert ledger.close(job.job_id) is job
    assert ledger.close(job.job_id) is None
    assert pools[0].references(blocks[0]) == 1


def test_ids_are_never_used_again(pools) -> None:
    ledger = JobLedger(pools)
    ids = []
    for _ in range(3):
        ids.append(ledger.new_id())
        ledger.open(_job(ids[-1], [], []), 1.0)
        ledger.close(ids[-1])
    assert ids == sorted(set(ids))
    with pytest.raises(InvariantError, match="never given out"):
        ledger.open(_job(ids[-1] + 1, [], []), 1.0)
    job = _job(ledger.new_id(), [], [])
    ledger.open(job, 1.0)
    with pytest.raises(InvariantError, match="open already"):
        ledger.open(job, 1.0)


def test_blocks_come_back_tail_first(pools) -> None:
    # Published blocks: the beginning of a prefix is the most useful part, so it must be evicted last.
    ledger = JobLedger(pools)
    blocks = pools[0].allocate(pools[0].total_blocks)
    job = _job(ledger.new_id(), blocks[:3], [])
    ledger.open(job, 1.0)
    for block in blocks[:3]:
        pools[0].publish(block, bytes([block]) * 32, parent_hash=None, token_ids=[])
    pools[0].free(blocks[:3])
    ledger.close(job.job_id)
    assert pools[0].allocate(3) == blocks[2::-1]

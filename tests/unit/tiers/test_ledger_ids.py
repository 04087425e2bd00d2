"""Ids of jobs across the lives of a core: a report to a crashed one must not end a job of the next."""

from __future__ import annotations

from headrace.kv.budget import fixed_layout
from headrace.kv.memory import KvMemory
from headrace.tiers.ledger import JobLedger
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
from headrace.types.plans import LoadJob


def test_a_report_to_a_former_life_changes_nothing():
    layout = fixed_layout([LayerCache(0, FullAttentionSpec(1, 4, 4, 2))], block_tokens=2, usable_blocks=4)
    pools = KvMemory(layout).pools
    former, ledger = JobLedger(pools), JobLedger(pools, first_id=1000)
    stale_id = former.new_id()
    blocks = pools[0].allocate(2)
    job = LoadJob(ledger.new_id(), "r", 0, 4, [blocks], [])
    ledger.open(job, 1.0)
    assert ledger.close(stale_id) is None
    assert ledger.held_blocks(0) == set(blocks)
    assert ledger.close(job.job_id) is job

"""The life of a load over real block tables: who owns which blocks, what is published when, and all ways it can end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from headrace.base.errors import InvariantError
from headrace.kv.coordinator import KvCoordinator
from headrace.sched.remote import RemoteGate
from headrace.tiers.connector import ConnectorCapabilities
from headrace.types.cache_specs import (
    CacheSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    GroupLayout,
    KvLayout,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.events import JobDone
from headrace.types.plans import LoadJob

FULL = FullAttentionSpec(1, 8, 8, 2)
SLIDING = SlidingWindowSpec(1, 8, 8, 2, window_tokens=8)
STATE = RecurrentSpec((StatePart("state", (32,), 4),))
CROSS = CrossAttentionSpec(1, 8, 8, 2)
BLOCK = 4


class Store:
    """A connector that has the first ``tokens`` tokens of everything."""

    def __init__(self, tokens: int = 0, *, capable: bool = False) -> None:
        self.tokens = tokens
        self.capabilities = ConnectorCapabilities(divergent_hits=capable)
        self.planned: list[LoadJob] = []
        self.finished: list[str] = []

    def lookup(self, request_id: str, hashes: Sequence[bytes], local_tokens: int, limit_tokens: int) -> int:
        return max(0, min(self.tokens, limit_tokens) - local_tokens)

    def load_planned(self, job: LoadJob) -> None:
        self.planned.append(job)

    def request_finished(self, request_id: str) -> None:
        self.finished.append(request_id)


class Bench:
    """A gate over the real coordinator."""

    def __init__(self, *specs: CacheSpec, tokens: int = 16, extents: int = 12, **options: object) -> None:
        groups = [
            GroupLayout(index, spec, [index], 0 if isinstance(spec, RecurrentSpec) else BLOCK, 8 * extents + 1)
            for index, spec in enumerate(specs)
        ]
        self.layout = KvLayout(groups, SPEC_BYTES, 8, extents)
        self.kv = KvCoordinator(self.layout, enable_prefix_caching=True, batch_tokens=64, steps_in_flight=2)
        self.store = Store(tokens, capable=bool(options.pop("capable", False)))
        self.gate = RemoteGate(self.store, self.kv, self.layout, **options)  # type: ignore[arg-type]
        self.names = 0

    def request(self, tokens: int = 22, first: int = 100, encoder_tokens: int = 0) -> SimpleNamespace:
        self.names += 1
        return SimpleNamespace(
            request_id=f"r{self.names}",
            token_ids=list(range(first, first + tokens)),
            kv=self.kv.new_sequence(prompt_tokens=tokens, encoder_tokens=encoder_tokens),
            wants_prompt_logprobs=False,
        )

    def load(self, request: SimpleNamespace, now_s: float = 0.0) -> LoadJob:
        offer = self.gate.offer(request, now_s)
        assert offer is not None
        assert offer.external_tokens > 0
        return self.gate.plan_load(request, offer, now_s)

    def run_locally(self, request: SimpleNamespace) -> None:
        """Compute a whole prompt and end it, so that its blocks are cached."""
        hit, tokens = self.kv.find_hit(request.kv, request.token_ids), len(request.token_ids)
        start = hit.tokens
        self.kv.start(request.kv, hit, tokens)
        while start < tokens:
            start = self.kv.next_stop(request.kv, start, tokens)
            self.kv.plan_saves(request.kv, start)
            self.kv.advance(request.kv, request.token_ids, start)
        self.kv.release(request.kv)

    def live(self) -> list[int]:
        return [pool.live_blocks for pool in self.kv.memory.pools]


SPEC_BYTES = FULL.block_bytes(BLOCK)


def test_a_job_names_the_blocks_and_hashes_of_its_range() -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    job = bench.load(request)
    assert (job.start_tokens, job.end_tokens) == (0, 16)
    assert job.blocks == [request.kv.tables[0]]
    assert len(job.blocks[0]) == 4
    assert job.hashes == request.kv.hashes[:4]
    assert bench.store.planned == [job]
    assert bench.gate.loading == [request]


def test_a_load_goes_on_behind_the_local_hit() -> None:
    bench = Bench(FULL, tokens=16)
    bench.run_locally(bench.request(tokens=9))
    request = bench.request()
    job = bench.load(request)
    assert (job.start_tokens, job.end_tokens) == (8, 16)
    assert job.blocks == [request.kv.tables[0][2:4]]
    assert job.hashes == request.kv.hashes[2:4]


def test_success_publishes_on_arrival_and_not_before() -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    job = bench.load(request)
    assert bench.kv.find_hit(bench.request().kv, request.token_ids).tokens == 0
    arrival = bench.gate.job_done(JobDone(job.job_id, 16))
    assert arrival is not None
    assert (arrival.request, arrival.tokens) == (request, 16)
    assert bench.kv.find_hit(bench.request().kv, request.token_ids).tokens == 16
    assert [bench.kv.memory.pools[0].references(block) for block in request.kv.tables[0]] == [1] * 4
    assert bench.gate.arrived == [request]
    assert len(bench.gate.ledger) == 0
    bench.gate.resumed(request)
    bench.kv.release(request.kv)
    assert bench.live() == [0]


def test_a_loaded_request_can_grow_and_compute() -> None:
    bench = Bench(FULL, STATE, tokens=16)
    request = bench.request()
    bench.gate.job_done(JobDone(bench.load(request).job_id, 16))
    bench.gate.resumed(request)
    grown = bench.kv.grow(request.kv, 22)
    assert grown is not None
    assert len(grown[0]) == 2
    bench.kv.advance(request.kv, request.token_ids, 22)
    bench.kv.release(request.kv)
    assert bench.live() == [0, 0]


@pytest.mark.parametrize("valid", [8, 10, 0, 15])
def test_a_part_that_arrives_is_found_by_an_ordinary_lookup(valid: int) -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    job = bench.load(request)
    arrival = bench.gate.job_done(JobDone(job.job_id, valid))
    assert arrival is not None
    assert arrival.tokens == 0
    assert bench.live() == [0]
    offer = bench.gate.offer(request, 1.0)
    assert offer is not None
    assert (offer.hit.tokens, offer.external_tokens) == (valid // BLOCK * BLOCK, 0), "it is not asked a second time"
    assert bench.gate.failed_loads == 1
    assert bench.gate.loaded_tokens == valid


def test_a_state_that_arrived_for_another_end_is_never_used() -> None:
    bench = Bench(FULL, STATE, tokens=16)
    request = bench.request()
    job = bench.load(request)
    assert job.blocks[1] == request.kv.tables[1]
    assert len(job.blocks[1]) == 1
    arrival = bench.gate.job_done(JobDone(job.job_id, 12))
    assert arrival is not None
    assert arrival.tokens == 0
    assert bench.kv.find_hit(request.kv, request.token_ids).tokens == 0, "blocks without a state are no hit"
    assert bench.live() == [0, 0]


def test_windows_are_loaded_only_where_the_end_reads_them() -> None:
    bench = Bench(FULL, SLIDING, tokens=20)
    request = bench.request(tokens=30)
    job = bench.load(request)
    assert 0 not in job.blocks[0]
    # Position 20 reads from 13 on: blocks 0 to 2 hold nothing that it needs.
    assert [block != 0 for block in job.blocks[1]] == [False, False, False, True, True]
    bench.gate.job_done(JobDone(job.job_id, 20))
    assert bench.kv.find_hit(bench.request(tokens=30).kv, request.token_ids).tokens == 20


def test_an_encoders_blocks_are_not_loaded() -> None:
    bench = Bench(FULL, CROSS, tokens=16)
    request = bench.request()
    job = bench.load(request)
    assert job.blocks[1] == []


# A deadline.


def test_after_the_deadline_the_request_computes_in_other_blocks() -> None:
    bench = Bench(FULL, tokens=16, load_timeout_s=5.0)
    request = bench.request()
    job = bench.load(request, now_s=10.0)
    assert bench.gate.next_deadline_s == 15.0
    assert bench.gate.expire(14.9) == []
    assert bench.gate.expire(15.0) == [request]
    assert bench.gate.expire(99.0) == []
    assert bench.gate.next_deadline_s is None
    offer = bench.gate.offer(request, 15.0)
    assert offer is not None
    assert offer.external_tokens == 0
    bench.kv.start(request.kv, offer.hit, 22)
    assert set(request.kv.tables[0]).isdisjoint(job.blocks[0])
    assert bench.gate.ledger.held_blocks(0) == set(job.blocks[0])
    # The late report frees the job's blocks and touches nobody else.
    table = list(request.kv.tables[0])
    assert bench.gate.job_done(JobDone(job.job_id, 16)) is None
    assert request.kv.tables[0] == table
    assert bench.live() == [len(table)]
    assert bench.kv.find_hit(bench.request().kv, request.token_ids).tokens == 0, "nobody vouches for a late load"


def test_a_deadline_is_that_of_its_own_load() -> None:
    bench = Bench(FULL, tokens=16, load_timeout_s=5.0)
    first, second = bench.request(), bench.request(first=500)
    bench.load(first, now_s=0.0)
    job = bench.load(second, now_s=3.0)
    assert bench.gate.expire(5.0) == [first]
    assert bench.gate.loading == [second]
    arrival = bench.gate.job_done(JobDone(job.job_id, 16))
    assert arrival is not None
    assert arrival.request is second


# An abort.


def test_an_abort_leaves_the_blocks_with_the_job() -> None:
    bench = Bench(FULL, STATE, tokens=16)
    request = bench.request()
    job = bench.load(request)
    held = bench.live()
    bench.gate.finished(request)
    assert bench.store.finished == [request.request_id]
    assert bench.live() == held
    assert request.kv.tables == [[], []]
    assert bench.gate.job_done(JobDone(job.job_id, 16)) is None
    assert bench.live() == [0, 0]


def test_an_abort_between_arrival_and_start_frees_everything() -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    bench.gate.job_done(JobDone(bench.load(request).job_id, 16))
    bench.gate.finished(request)
    assert bench.live() == [0]
    assert bench.gate.arrived == []


def test_reports_of_no_open_job_are_ignored() -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    job = bench.load(request)
    assert bench.gate.job_done(JobDone(job.job_id + 7, 16)) is None
    assert bench.gate.loading == [request]
    assert bench.gate.job_done(JobDone(job.job_id, 16)) is not None
    table = list(request.kv.tables[0])
    assert bench.gate.job_done(JobDone(job.job_id, 0)) is None
    assert request.kv.tables[0] == table
    assert bench.live() == [4]


@pytest.mark.parametrize("valid", [-3, 99])
def test_a_report_outside_of_the_range_counts_as_its_end(valid: int) -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    arrival = bench.gate.job_done(JobDone(bench.load(request).job_id, valid))
    assert arrival is not None
    assert arrival.tokens == (16 if valid > 16 else 0)


# Several loads.


def test_loads_keep_free_what_each_still_needs() -> None:
    bench = Bench(FULL, tokens=16)
    assert bench.gate.reserved_blocks() == [0]
    first, second = bench.request(tokens=30), bench.request(tokens=22, first=500)
    bench.load(first)
    assert bench.gate.reserved_blocks() == [8 - 4]
    job = bench.load(second)
    assert bench.gate.reserved_blocks() == [8 - 4 + 6 - 4]
    bench.gate.job_done(JobDone(job.job_id, 16))
    assert bench.gate.reserved_blocks() == [8 - 4 + 6 - 4], "it has its blocks, and still no slot"
    bench.gate.resumed(second)
    assert bench.gate.reserved_blocks() == [8 - 4]


def test_two_requests_may_load_the_same_content() -> None:
    bench = Bench(FULL, tokens=16)
    first, second = bench.request(), bench.request()
    jobs = [bench.load(first), bench.load(second)]
    assert set(jobs[0].blocks[0]).isdisjoint(jobs[1].blocks[0])
    for job, request in zip(jobs, (first, second), strict=True):
        arrival = bench.gate.job_done(JobDone(job.job_id, 16))
        assert arrival is not None
        assert arrival.request is request
        bench.gate.finished(request)
    assert bench.live() == [0]


def test_ids_of_jobs_rise_over_the_lives_of_a_request() -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    first = bench.load(request)
    bench.gate.job_done(JobDone(first.job_id, 16))
    bench.gate.resumed(request)
    # Preempted, its cache gone, it may load once more; the report of the first load says nothing about the second.
    bench.kv.release(request.kv)
    bench.kv.forget_idle()
    second = bench.load(request)
    assert second.job_id > first.job_id
    assert bench.gate.job_done(JobDone(first.job_id, 0)) is None
    assert bench.gate.loading == [request]


def test_a_state_behind_the_rest_is_brought_by_a_store_that_can() -> None:
    capable = Bench(FULL, STATE, tokens=20, capable=True)
    common = Bench(FULL, STATE, tokens=20)
    for bench in (capable, common):
        bench.run_locally(bench.request(tokens=17))
        # The checkpoint at the prompt's last boundary is lost, the blocks are not.
        pool = bench.kv.memory.pools[1]
        for block_hash in list(pool.cached_hashes()):
            pool.forget(block_hash)
    job = capable.load(capable.request(tokens=30))
    assert (job.start_tokens, job.end_tokens) == (16, 20)
    assert len(job.blocks[1]) == 1
    job = common.load(common.request(tokens=30))
    assert (job.start_tokens, job.end_tokens) == (0, 20)


def test_a_load_cannot_start_from_a_hit_that_is_copied() -> None:
    bench = Bench(FULL, tokens=16)
    request = bench.request()
    offer = bench.gate.offer(request, 0.0)
    assert offer is not None
    bench.gate.plan_load(request, offer, 0.0)
    with pytest.raises(InvariantError):
        bench.gate.plan_load(request, offer, 0.0)


def _check_owners(bench: Bench, holding: list[SimpleNamespace], open_jobs: list[LoadJob]) -> None:
    """References are those of requests and open jobs; what a job may write is in no table but its own request's."""
    for index, pool in enumerate(bench.kv.memory.pools):
        tables = [request.kv.tables[index] for request in [*holding, *bench.gate.loading]]
        owners = Counter(block for table in tables for block in table if block)
        owners.update(block for job in open_jobs for block in set(job.blocks[index]) if block)
        assert {block: pool.references(block) for block in owners} == dict(owners)
        assert pool.live_blocks == len(owners)
        for job in open_jobs:
            for request in holding:
                assert set(job.blocks[index]).isdisjoint(set(request.kv.tables[index]) - {0})


@pytest.mark.parametrize("seed", range(30))
def test_random_lives_leak_nothing_and_write_into_nobodys_blocks(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(FULL, SLIDING, STATE, tokens=BLOCK * rng.randint(2, 10), extents=10, load_timeout_s=5.0)
    open_jobs: list[LoadJob] = []
    past_jobs: list[LoadJob] = []
    waiting: list[SimpleNamespace] = []
    holding: list[SimpleNamespace] = []
    for step in range(80):
        now_s = float(step)
        action = rng.random()
        if action < 0.3:
            waiting.append(bench.request(tokens=rng.randint(5, 45), first=100 * rng.randint(1, 3)))
        elif action < 0.6 and waiting:
            request = rng.choice(waiting)
            offer = bench.gate.offer(request, now_s)
            assert offer is not None
            demand = bench.kv.demand_blocks(
                offer.hit, len(request.token_ids), request.kv, external_tokens=offer.external_tokens
            )
            if bench.kv.has_free(demand, bench.gate.reserved_blocks(), offer.hit):
                waiting.remove(request)
                if offer.external_tokens:
                    open_jobs.append(bench.gate.plan_load(request, offer, now_s))
                else:
                    bench.kv.start(request.kv, offer.hit, len(request.token_ids))
                    holding.append(request)
        elif action < 0.8 and open_jobs:
            job = open_jobs.pop(rng.randrange(len(open_jobs)))
            past_jobs.append(job)
            arrival = bench.gate.job_done(JobDone(job.job_id, rng.choice([job.start_tokens, job.end_tokens])))
            if arrival is not None and arrival.tokens:
                bench.gate.resumed(arrival.request)
                holding.append(arrival.request)
            elif arrival is not None:
                waiting.append(arrival.request)
        elif action < 0.85 and past_jobs:
            assert bench.gate.job_done(JobDone(rng.choice(past_jobs).job_id, 99)) is None
        elif action < 0.95 and (bench.gate.loading or holding):
            request = rng.choice([*bench.gate.loading, *holding])
            if request in holding:
                holding.remove(request)
                bench.kv.release(request.kv)
            bench.gate.finished(request)
        waiting.extend(bench.gate.expire(now_s))
        _check_owners(bench, holding, open_jobs)

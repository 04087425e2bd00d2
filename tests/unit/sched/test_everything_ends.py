"""Random loads with every feature at once: whatever is drawn, each request ends once, and all memory comes back.

Content is the simulator's business; here a worker answers that knows nothing of blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import fixed_layout
from headrace.sched.request import RequestState
from headrace.sched.scheduler import Scheduler
from headrace.tiers.connector import ConnectorCapabilities
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerCache,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.events import AbortRequest, AddRequest, GrammarReady, InboxEvent, JobDone, LookupDone
from headrace.types.outputs import ErrorRecord, RequestDelta
from headrace.types.plans import LoadJob, StepPlan
from headrace.types.requests import EngineRequest, MediaSpan
from headrace.types.results import RowResult, StepResult
from headrace.types.sampling import SamplingParams

FULL = FullAttentionSpec(1, 4, 4, 2)
SLIDING = SlidingWindowSpec(1, 4, 4, 2, window_tokens=6)
CHUNKED = ChunkedLocalSpec(1, 4, 4, 2, chunk_tokens=12)
STATE = RecurrentSpec((StatePart("state", (16,), 4),))
CROSS = CrossAttentionSpec(1, 4, 4, 2)
MODELS: list[list[Any]] = [
    [FULL],
    [FULL, SLIDING],
    [FULL, STATE],
    [SLIDING, CHUNKED],
    [FULL, SLIDING, STATE],
    [FULL, CROSS],
    [STATE],
]


class Store:
    """An outside store with moods."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.capabilities = ConnectorCapabilities(divergent_hits=chance.random() < 0.5)
        self.asked: list[RequestId] = []
        self.open: list[LoadJob] = []

    def lookup(
        self, request_id: RequestId, hashes: Sequence[bytes], local_tokens: int, limit_tokens: int
    ) -> int | None:
        if self._chance.random() < 0.3:
            self.asked.append(request_id)
            return None
        units = (limit_tokens - local_tokens) // 4
        return 4 * self._chance.randint(0, units)

    def load_planned(self, job: LoadJob) -> None:
        self.open.append(job)

    def request_finished(self, request_id: RequestId) -> None:
        pass

    def events(self) -> list[InboxEvent]:
        events: list[InboxEvent] = [LookupDone(name) for name in self.asked if self._chance.random() < 0.5]
        self.asked.clear()
        for job in [job for job in self.open if self._chance.random() < 0.3]:
            self.open.remove(job)
            end = job.end_tokens if self._chance.random() < 0.6 else self._chance.randint(0, job.end_tokens)
            events.append(JobDone(job.job_id, end))
        return events


class World:
    """A scheduler, a worker, a store and clients."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.specs = chance.choice(MODELS)
        sizes = [0 if spec is STATE else 4 for spec in self.specs]
        self.drafts = chance.choice([0, 0, 2]) if STATE not in self.specs else 0
        seqs = chance.randint(1, 4)
        config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs * (1 + self.drafts), chance.choice([4, 9, 30])),
            policy=chance.choice(["fcfs", "priority"]),
            tenant_quota=chance.choice([1.0, 0.5, 0.0]),
            speculative_tokens=self.drafts,
            steps_in_flight=chance.randint(1, 2),
            watermark=chance.choice([0.0, 0.1]),
            long_prefill_token_threshold=chance.choice([0, 5]),
        )
        layout = fixed_layout(
            [LayerCache(layer, spec) for layer, spec in enumerate(self.specs)],
            block_tokens=sizes,
            usable_blocks=chance.randint(4, 14),
        )
        self.store = Store(chance) if chance.random() < 0.5 and CROSS not in self.specs else None
        self.encodes = chance.random() < 0.5
        self.scheduler = Scheduler(
            config,
            layout=layout,
            max_model_len=40,
            enable_prefix_caching=chance.random() < 0.8,
            hash_tokens=4,
            checkpoint_tokens=chance.choice([0, 8]),
            connector=self.store,
            load_timeout_s=8.0,
            lookup_timeout_s=3.0,
            encoder_budget_rows=6 if self.encodes else 0,
            encoder_cache_rows=chance.choice([3, 6, 9]),
        )
        self.config = config
        self.live: dict[RequestId, EngineRequest] = {}
        self.ended: dict[RequestId, RequestDelta | None] = {}
        self.outputs: dict[RequestId, int] = {}
        self.inbox: list[InboxEvent] = []
        self.flights: list[StepPlan] = []
        self.now_s = 0.0
        self.number = 0
        self.idle = 0

    def arrive(self) -> None:
        chance = self.chance
        self.number += 1
        name = RequestId(f"r{self.number}")
        prompt = [chance.choice([0, 1]) + 7 * (place % 3) for place in range(chance.randint(1, 24))]
        media = []
        if self.encodes and len(prompt) > 6 and chance.random() < 0.5:
            media = [MediaSpan(chance.choice("xyz"), 1, 2, 2), MediaSpan(chance.choice("vw"), 4, 2, 5)]
        grammar = chance.random() < 0.15
        earlier = list(self.live)
        source = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=chance.choice([1, 4, 20]),
                seed=0,
                min_tokens=chance.choice([0, 1]),
                stop_token_ids=[5],
                logprobs=chance.choice([None, None, 1]),
            ),
            arrival_s=self.now_s,
            priority=chance.randint(-1, 1),
            deadline_s=self.now_s + chance.randint(1, 60) if chance.random() < 0.2 else None,
            tenant=chance.choice([None, "a", "b"]),
            media=media,
            encoder_tokens=chance.randint(1, 6) if CROSS in self.specs else 0,
            grammar="g" if grammar else None,
            leader_id=chance.choice(earlier) if earlier and chance.random() < 0.3 else None,
        )
        self.live[name] = source
        self.outputs[name] = 0
        self.inbox.append(AddRequest(source))
        if grammar and chance.random() < 0.9:
            failed = ErrorRecord("bad_grammar", "invalid_request_error", "no", 400, False)
            self.inbox.append(GrammarReady(name, failed if chance.random() < 0.2 else None))
        elif grammar:
            self.inbox.append(AbortRequest(name))
            self.end(name, None)

    def end(self, name: RequestId, delta: RequestDelta | None) -> None:
        assert name not in self.ended, f"{name} ends twice"
        self.ended[name] = delta
        del self.live[name]

    def schedule(self) -> None:
        if self.store is not None:
            self.inbox += self.store.events()
        inbox, self.inbox = self.inbox, []
        self.now_s += 1.0
        plan = self.scheduler.schedule(inbox, self.now_s)
        assert plan.total_tokens <= self.config.max_num_batched_tokens
        self.flights.append(plan)
        # Nothing may stand still for ever: somebody computes, is in flight, or has somebody who must answer.
        waits_outside = self.scheduler.remote is not None and bool(
            self.scheduler.remote.ledger.jobs or self.scheduler.stats().waiting_lookup
        )
        busy = len(self.flights) > 1 or plan.total_tokens or waits_outside
        there = self.scheduler.running or self.scheduler.waiting
        self.idle = self.idle + 1 if there and not busy else 0
        assert self.idle < 3, f"nothing moves: {[(r.request_id, r.state) for r in self.scheduler.waiting]}"

    def answer(self, row: Any) -> RowResult:
        if self.chance.random() < 0.01:
            return RowResult([], error="NaN")
        if not row.sample:
            return RowResult([])
        count = self.chance.randint(1, row.drafts + 1)
        return RowResult([self.chance.randint(0, 20) for _ in range(count)])

    def apply(self) -> None:
        plan = self.flights.pop(0)
        rows = [self.answer(row) for row in plan.rows]
        tokens = [self.chance.randint(0, 20) for _ in plan.decodes]
        news = self.scheduler.apply(plan, StepResult(plan.step, rows, tokens), self.now_s)
        for delta in news.each():
            if delta.request_id in self.ended and self.ended[delta.request_id] is None:
                continue
            source = self.live[delta.request_id]
            self.outputs[delta.request_id] += len(delta.new_token_ids)
            assert self.outputs[delta.request_id] <= (source.sampling.max_tokens or 0)
            if delta.finish_reason is not None:
                self.end(delta.request_id, delta)

    def check(self) -> None:
        for request in self.scheduler.running:
            assert request.state is RequestState.RUNNING
            assert request.computed_tokens <= request.planned_tokens
            assert len(request.token_ids) <= request.known_tokens <= request.limit_tokens
        for request in self.scheduler.waiting:
            owns = request.state in (RequestState.LOADING, RequestState.ARRIVED)
            assert any(request.kv.tables) == owns, request.state

    def run(self, steps: int) -> None:
        for step in range(steps + 2000):
            draining = step >= steps
            if not draining and self.chance.random() < 0.5:
                self.arrive()
            if not draining and self.live and self.chance.random() < 0.05:
                name = self.chance.choice(list(self.live))
                self.inbox.append(AbortRequest(name))
                self.end(name, None)
            if draining and not self.scheduler.has_work and not self.inbox:
                break
            self.schedule()
            self.check()
            while len(self.flights) >= self.config.steps_in_flight or (self.flights and self.chance.random() < 0.2):
                self.apply()
                self.check()
        while self.flights:
            self.apply()


@pytest.mark.parametrize("seed", range(60))
def test_everything_ends_and_all_memory_comes_back(seed: int) -> None:
    world = World(seed)
    world.run(60)
    assert not world.live
    assert not world.scheduler.has_work
    for pool in world.scheduler.kv.memory.pools:
        assert pool.live_blocks == 0
    if world.scheduler.encoder is not None:
        assert world.scheduler.encoder.cache.used_rows == 0

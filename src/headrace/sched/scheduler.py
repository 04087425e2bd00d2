"""Continuous batching with a token budget: running requests first, decodes before prefills, then waiting ones.

There are no phases: each step, a request computes some of the tokens that are known and not yet computed. Progress is
counted when a step is planned, and settled when its result is applied, so that a second step can be planned in
between. This module is the order of the passes; each has a file: `door` (events), `running`, `starting`, `settling`,
over the `roster` that knows who is where. Must not look at a clock, at token texts, or at the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from headrace.base.errors import ConfigError, invariant
from headrace.base.ids import RequestId, StepId
from headrace.config.engine import SchedulerConfig
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.events import KvEvent
from headrace.sched.admission import Limits
from headrace.sched.door import Door
from headrace.sched.draft import Flight, StepDraft
from headrace.sched.encoding import EncoderGate
from headrace.sched.queues import POLICIES
from headrace.sched.quotas import Quotas
from headrace.sched.remote import LOAD_TIMEOUT_S, LOOKUP_TIMEOUT_S, RemoteGate
from headrace.sched.request import Request, RequestState
from headrace.sched.reserve import FutureUse
from headrace.sched.roster import Roster
from headrace.sched.running import RunningPass
from headrace.sched.settling import SettlingPass
from headrace.sched.starting import StartingPass
from headrace.tiers.connector import KvConnector
from headrace.types.cache_specs import KvLayout
from headrace.types.events import InboxEvent
from headrace.types.outputs import SchedulerStats, StepNews
from headrace.types.plans import StepPlan
from headrace.types.results import StepResult


class Scheduler:
    """Decides what each step computes, and turns results into news for the front end.

    The caller alternates `schedule` and `apply`, or plans one step ahead (``steps_in_flight`` 2), and applies every
    plan, empty ones included, in order. Plans must be executed in order: a block freed here may be handed out by a
    later plan while an earlier one still writes to it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        layout: KvLayout,
        max_model_len: int,
        enable_prefix_caching: bool,
        hash_seed: str = "",
        hash_tokens: int | None = None,
        checkpoint_tokens: int = 4096,
        eviction: str = "lru",
        encoder_cache_rows: int = 0,
        encoder_budget_rows: int = 0,
        connector: KvConnector | None = None,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        first_job_id: int = 1,
        record_events: bool = False,
    ) -> None:
        """Make an idle scheduler.

        Args:
            config: limits and policy.
            layout: groups and blocks of the KV cache.
            max_model_len: longest prompt + output in tokens.
            enable_prefix_caching: reuse the KV of common beginnings.
            hash_seed: start of the prefix hashes, the same as in the front end.
            hash_tokens: tokens under one prefix hash; None: the greatest that divides all blocks.
            checkpoint_tokens: distance of regular checkpoints of recurrent states; 0 for none.
            eviction: policy by which free blocks lose their content.
            encoder_cache_rows: encoder output that the worker keeps between steps.
            encoder_budget_rows: most encoder output made in one step; 0: there is no encoder, media are refused.
            connector: an outside store of KV, or None.
            lookup_timeout_s: how long a request waits for that store's answer.
            load_timeout_s: how long a request waits for a load before it computes by itself.
            first_job_id: above the ids of all jobs of earlier cores whose reports may still come.
            record_events: keep cache events for `take_events`; without a taker they would pile up.

        Raises:
            ConfigError: limits that would let a running request starve, an unknown policy, or drafts beside a
                recurrent state.
        """
        _check(config)
        sizes = {"batch_tokens": config.max_num_batched_tokens, "in_flight": config.steps_in_flight}
        self._config = config
        self.kv = KvCoordinator(
            layout,
            enable_prefix_caching=enable_prefix_caching,
            batch_tokens=config.max_num_batched_tokens,
            steps_in_flight=config.steps_in_flight,
            draft_tokens=config.speculative_tokens,
            hash_tokens=hash_tokens,
            checkpoint_tokens=checkpoint_tokens,
            hash_seed=hash_seed,
            eviction=eviction,
            record_events=record_events,
        )
        self.encoder: EncoderGate | None = None
        if encoder_budget_rows:
            self.encoder = EncoderGate(
                cache_rows=encoder_cache_rows,
                budget_rows=encoder_budget_rows,
                lookahead_tokens=config.speculative_tokens,
            )
        self.remote: RemoteGate | None = None
        if connector is not None:
            self.remote = RemoteGate(
                connector,
                self.kv,
                layout,
                lookup_timeout_s=lookup_timeout_s,
                load_timeout_s=load_timeout_s,
                first_job_id=first_job_id,
            )
        self._roster = Roster(config, self.kv, self.encoder, self.remote)
        self._future = FutureUse(
            self.kv, layout.groups, watermark=config.watermark, max_model_len=max_model_len, **sizes
        )
        self._running_pass = RunningPass(self._roster)
        self._starting_pass = StartingPass(
            self._roster, self._running_pass, self._future, Quotas(layout, quota=config.tenant_quota, **sizes)
        )
        self._settling_pass = SettlingPass(self._roster)
        limits = Limits(layout, max_model_len=max_model_len, hash_tokens=self.kv.hash_tokens, **sizes)
        self._door = Door(self._roster, limits, self._starting_pass.forget)
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """True if another step has something to do: requests, slots to release, news to report, jobs to wait for."""
        roster = self._roster
        return bool(roster.requests or roster.releases or roster.news or roster.open_jobs)

    @property
    def next_event_s(self) -> float | None:
        """Monotonic seconds of the next moment at which time alone has an effect; None if there is none.

        An engine whose last plan was empty may sleep until then, or until something comes.
        """
        moments = [self._roster.deadlines.next_s, self.remote.next_deadline_s if self.remote else None]
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def hash_block_tokens(self) -> int:
        """Tokens under one prefix hash, for those who compute ``EngineRequest.block_hashes``."""
        return self.kv.hash_tokens

    @property
    def running(self) -> list[Request]:
        """Requests that own a slot and blocks; to look at, not to change."""
        return list(self._roster.running.values())

    @property
    def waiting(self) -> list[Request]:
        """Requests without a slot, in order, whatever they wait for (`Request.state`); to look at, not to change."""
        return self._roster.waiting()

    def stats(self) -> SchedulerStats:
        """Return state and running totals. Blocks are summed over the groups."""
        roster, remote, encoder = self._roster, self.remote, self.encoder
        pools = self.kv.memory.pools
        parked = roster.gates.counts() if len(roster.gates) else {}
        with_blocks = len(remote.loading) + len(remote.arrived) if remote else 0
        return SchedulerStats(
            step=self._steps,
            running=len(roster.running),
            waiting=len(roster.requests) - len(roster.running),
            blocks_total=sum(pool.total_blocks for pool in pools),
            blocks_free=sum(pool.free_blocks for pool in pools),
            blocks_cached=sum(pool.cached_blocks for pool in pools),
            waiting_grammar=parked.get(RequestState.GRAMMAR, 0),
            waiting_leader=parked.get(RequestState.LEADER, 0),
            waiting_quota=parked.get(RequestState.QUOTA, 0),
            waiting_lookup=parked.get(RequestState.LOOKUP, 0),
            waiting_load=with_blocks,
            loaded_tokens=remote.loaded_tokens if remote else 0,
            failed_loads=remote.failed_loads + remote.expired_loads if remote else 0,
            encoder_rows_used=encoder.cache.used_rows if encoder else 0,
            encoder_rows_resident=encoder.cache.resident_rows if encoder else 0,
            reserve_share=self._future.share,
            **vars(roster.totals),
        )

    def take_events(self) -> list[KvEvent]:
        """Return the cache events since the last call (none unless ``record_events``)."""
        return self.kv.take_events()

    def schedule(self, inbox: Sequence[InboxEvent], now_s: float) -> StepPlan:
        """Plan one step.

        Args:
            inbox: events since the last call, in order.
            now_s: monotonic seconds.

        Returns:
            The plan; without rows if there is nothing to compute.

        Mutates: requests, blocks, slots: progress is counted as if the plan had run.
        Requires: fewer than ``steps_in_flight`` plans await `apply`.
        """
        roster, config = self._roster, self._config
        invariant(len(roster.flights) < config.steps_in_flight, "too many plans await their result")
        self._door.take(inbox)
        self._door.let_time_pass(now_s)
        draft = StepDraft(StepId(self._steps), config.max_num_batched_tokens, roster.releases)
        for slot in roster.releases:
            heapq.heappush(roster.free_slots, slot)
        roster.releases = []
        self._steps += 1
        self._starting_pass.resume_arrived(draft, now_s)
        prefills = self._running_pass.plan_decodes(draft)
        prefilling = self._running_pass.plan_prefills(draft, prefills, others_wait=self._starting_pass.others_wait())
        if not draft.preempted:
            self._starting_pass.run(draft, now_s, prefilling)
        if draft.shortened:
            self._running_pass.use_the_rest(draft)
        if draft.ended:
            self._running_pass.save(draft)
        self._future.settle(preempted=draft.preempted, running=bool(roster.running))
        roster.totals.checkpoints += len(draft.saves)
        plan = draft.plan(self.encoder.close_step() if self.encoder else None)
        tokens = config.max_num_batched_tokens - draft.budget_tokens
        roster.flights.append(Flight(plan, draft.requests, draft.decoding, tokens, now_s))
        return plan

    def planned_ids(self) -> list[RequestId]:
        """Return who has work in a plan that awaits its result; twice if in two plans."""
        return [
            request.request_id
            for flight in self._roster.flights
            for owners in (flight.decoding, flight.requests)
            for request in owners
        ]

    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> StepNews:
        """Settle a plan with its result.

        Args:
            plan: the oldest one not applied.
            result: the worker's answer, aligned with decodes and rows of the plan.
            now_s: monotonic seconds.

        Returns:
            News about requests. Work for requests that have ended meanwhile is dropped.

        Mutates: requests, blocks, slots, the prefix cache.
        """
        roster = self._roster
        invariant(
            bool(roster.flights) and roster.flights[0].plan.step == plan.step == result.step,
            f"result {result.step} for plan {plan.step}, which is not the oldest in flight",
        )
        flight = roster.flights.popleft()
        wanted = (len(plan.rows), len(plan.decodes))
        given = (len(result.rows), len(result.decode_tokens))
        invariant(given == wanted, f"step {plan.step}: results for {given} rows and decodes in place of {wanted}")
        deltas, roster.news = roster.news, []
        request_ids, token_ids = self._settling_pass.apply_decodes(flight, result, deltas)
        self._settling_pass.apply_rows(flight, result, deltas)
        roster.gates.check_leaders()
        roster.totals.step_tokens = flight.tokens
        roster.totals.step_s = now_s - flight.started_s
        return StepNews(request_ids, token_ids, deltas)


def _check(config: SchedulerConfig) -> None:
    least_tokens = config.max_num_seqs * (1 + config.speculative_tokens)
    if config.max_num_batched_tokens < least_tokens:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below the {least_tokens} that max_num_seqs "
            f"{config.max_num_seqs} decodes of {1 + config.speculative_tokens} tokens take: raise it, or lower "
            "max_num_seqs",
            param="max_num_batched_tokens",
        )
    if config.policy not in POLICIES:
        raise ConfigError(f"policy {config.policy!r} is not one of {', '.join(POLICIES)}", param="policy")

"""Requests that wait for KV from an outside store: what to ask, what to load, and what to do when it comes or does not.

The life of such a request::

    WAITING --offer--> (ask later: stays WAITING, others may pass)
            --plan_load--> WAITING_FOR_REMOTE --job_done--> WAITING, with blocks and computed tokens
                                              --expire----> WAITING, without: it computes itself, in other blocks
                                              --finished--> gone; its blocks stay with the job until that reports

A loading request owns blocks and no slot, so it cannot be preempted: a load is only begun beside what all other loading
requests still need (`RemoteGate.reserved_blocks`). Must not move requests between states or queues; the scheduler does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import invariant
from headrace.base.ids import BlockId, RequestId
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.groups import NO_GROUP_HIT, GroupHit
from headrace.kv.sequence import Hit
from headrace.sched.request import Request
from headrace.tiers.connector import KvConnector
from headrace.tiers.ledger import JobLedger
from headrace.types.cache_specs import GroupLayout, KvLayout, kind_of
from headrace.types.events import JobDone, LookupDone
from headrace.types.plans import LoadJob

LOOKUP_TIMEOUT_S = 1.0
LOAD_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RemoteOffer:
    """What a waiting request may start from.

    Attributes:
        hit: what is here. Not pinned: use it before anything else is allocated.
        external_tokens: what the store has beyond ``hit.tokens``; 0 for an ordinary start.
    """

    hit: Hit
    external_tokens: int


@dataclass(frozen=True)
class Arrival:
    """The end of a load.

    Attributes:
        request: may run now.
        tokens: computed tokens, all in blocks that ``request.kv`` holds; 0 if nothing is usable as it stands. Then its
            blocks are released, and an ordinary look-up finds what did arrive.
    """

    request: Request
    tokens: int


@dataclass
class _Record:
    """What the gate knows of a request.

    Attributes:
        asked: the store knows of it.
        asked_s: since when it waits for an answer, or None; "ask later" goes on with the same wait.
        pending: the store said "ask later" and has not called since.
        barred: do not ask again: it took too long, or failed.
    """

    asked: bool = False
    asked_s: float | None = None
    pending: bool = False
    barred: bool = False


class RemoteGate:
    """Between the waiting queue and an outside store.

    The scheduler's part, for each waiting request that holds no blocks:

    1. ``offer``: None = leave it in the queue and look at the next one.
    2. ``external_tokens == 0``: an ordinary start from ``offer.hit``.
    3. Else, if the **whole** known sequence fits into what is free beside the watermark and `reserved_blocks`:
       ``plan_load``, append the job to the plan, take the request out of the queue (state WAITING_FOR_REMOTE). No row,
       no slot, no look-ahead. If it does not fit, it stays where it is.

    And at the start of each pass: `job_done` and `lookup_done` for the events of the inbox, then `expire`. A request
    that came back with blocks is started by growing its tables, with a `SlotStart`; then `resumed`.
    """

    def __init__(
        self,
        connector: KvConnector,
        kv: KvCoordinator,
        layout: KvLayout,
        *,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        first_job_id: int = 1,
    ) -> None:
        """Make a gate without any load.

        Args:
            connector: the store.
            kv: block tables.
            layout: of the KV memory.
            lookup_timeout_s: how long a request waits for the answer of a look-up before it goes on without.
            load_timeout_s: how long it waits for a load before it computes by itself.
            first_job_id: see `JobLedger`.
        """
        self._connector = connector
        self._kv = kv
        self._groups = layout.groups
        self._kinds = [kind_of(group.spec) for group in layout.groups]
        self._align_tokens = math.lcm(kv.hash_tokens, *(g.block_tokens for g in layout.groups if g.block_tokens))
        self._lookup_timeout_s = lookup_timeout_s
        self._load_timeout_s = load_timeout_s
        self.ledger = JobLedger(kv.memory.pools, first_id=first_job_id)
        self._records: dict[RequestId, _Record] = {}
        self._loads: dict[int, Request] = {}
        self._arrived: dict[RequestId, Request] = {}
        self.loaded_tokens = 0
        self.failed_loads = 0
        self.expired_loads = 0

    @property
    def loading(self) -> list[Request]:
        """Requests that wait for a load; to look at, not to change."""
        return list(self._loads.values())

    @property
    def arrived(self) -> list[Request]:
        """Requests without a slot that hold the blocks of a finished load; to look at, not to change."""
        return list(self._arrived.values())

    @property
    def next_deadline_s(self) -> float | None:
        """Monotonic seconds of the next moment at which `expire` or `offer` has something to do by itself."""
        moments = [entry.deadline_s for entry in self.ledger.jobs if entry.job.job_id in self._loads]
        moments += [self._ask_until_s(record) for record in self._records.values() if record.pending]
        return min(moments, default=None)

    def reserved_blocks(self) -> list[int]:
        """Return per group what the requests that hold loaded or loading blocks still need for their known tokens.

        A new load must leave these free; then all of them can go on once nobody else runs.
        """
        reserved = [0] * len(self._groups)
        for request in [*self._loads.values(), *self._arrived.values()]:
            for index, blocks in enumerate(self._kv.missing_blocks(request.kv, len(request.token_ids))):
                reserved[index] += blocks
        return reserved

    def offer(self, request: Request, now_s: float) -> RemoteOffer | None:
        """Return what a request may start from, or None if the store is still looking.

        The store is asked at the end of the last whole block, so that a longer answer can replace a partial tail; a
        tail that is as long as the answer is kept. If the store is trusted with the recurrent state and only that is
        behind, it is asked at the end of what all other groups have.

        Args:
            request: a waiting one that holds no blocks.
            now_s: monotonic seconds.

        Mutates: ``request.kv.hashes``, notes about the look-up.
        """
        if request.wants_prompt_logprobs or not request.kv.cacheable:
            # What has no name of its own may lie under its hashes.
            return RemoteOffer(self._kv.no_hit(), 0)
        record = self._records.setdefault(request.request_id, _Record())
        if record.pending and now_s < self._ask_until_s(record):
            return None
        record.barred |= record.pending
        record.pending = False
        if record.barred:
            return RemoteOffer(self._kv.find_hit(request.kv, request.token_ids), 0)
        hit, diverged = self._local(request)
        tail_tokens = hit.tokens % self._align_tokens
        aligned_tokens = hit.tokens - tail_tokens
        record.asked = True
        external_tokens = self._ask(request, aligned_tokens)
        if external_tokens is None:
            record.pending = True
            record.asked_s = now_s if record.asked_s is None else record.asked_s
            return None
        record.asked_s = None
        if external_tokens > tail_tokens:
            return RemoteOffer(self._cut(hit, aligned_tokens), external_tokens)
        if diverged:
            hit = self._kv.find_hit(request.kv, request.token_ids)
        return RemoteOffer(hit, 0)

    def asked_until_s(self, request: Request) -> float:
        """Return the monotonic seconds at which a request that was told "ask later" goes on without an answer."""
        return self._ask_until_s(self._records[request.request_id])

    def plan_load(self, request: Request, offer: RemoteOffer, now_s: float) -> LoadJob:
        """Give a request its hit and blocks for what comes, and make the job that fills them.

        Args:
            request: the one of the offer.
            offer: of this pass, with external tokens.
            now_s: monotonic seconds.

        Returns:
            The job, for `StepPlan.loads`.

        Mutates: ``request.kv``, the pools, the ledger.
        Requires: the whole known sequence fits, and nothing was allocated since the offer.
        """
        start_tokens = offer.hit.tokens
        end_tokens = start_tokens + offer.external_tokens
        copies = self._kv.start(request.kv, offer.hit, end_tokens, external_tokens=offer.external_tokens)
        invariant(not copies, f"request {request.request_id}: a load cannot go on from a block that is being copied")
        unit = self._kv.hash_tokens
        job = LoadJob(
            job_id=self.ledger.new_id(),
            request_id=request.request_id,
            start_tokens=start_tokens,
            end_tokens=end_tokens,
            blocks=[
                _targets(layout, kind, request.kv.tables[index], start_tokens, end_tokens)
                for index, (layout, kind) in enumerate(zip(self._groups, self._kinds, strict=True))
            ],
            hashes=list(request.kv.hashes[start_tokens // unit : end_tokens // unit]),
        )
        self.ledger.open(job, now_s + self._load_timeout_s)
        self._loads[job.job_id] = request
        self._connector.load_planned(job)
        return job

    def job_done(self, event: JobDone) -> Arrival | None:
        """Settle a job. The job gives its blocks back, whoever waits; a request that waits may go on.

        What is valid is published now and not before. If that is not all, the request starts anew: its recurrent state
        would be that of the end, and windows before another end may be missing, so nothing is trimmed.

        Args:
            event: from the inbox.

        Returns:
            The request that may run now, or None: nobody waits for this job, or no such job is open.

        Mutates: pools, caches, ``request.kv``.
        """
        job = self.ledger.close(event.job_id)
        request = self._loads.pop(event.job_id, None)
        if job is None or request is None:
            return None
        valid_tokens = min(max(event.valid_tokens, job.start_tokens), job.end_tokens)
        self._kv.external_done(request.kv, request.token_ids, valid_tokens)
        self.loaded_tokens += valid_tokens - job.start_tokens
        if valid_tokens == job.end_tokens:
            self._arrived[request.request_id] = request
            return Arrival(request, valid_tokens)
        self.failed_loads += 1
        self._records[request.request_id].barred = True
        self._kv.release(request.kv)
        return Arrival(request, 0)

    def lookup_done(self, event: LookupDone) -> None:
        """Let a request ask again. Unknown requests are ignored.

        Mutates: notes about the look-up.
        """
        record = self._records.get(event.request_id)
        if record is not None:
            record.pending = False

    def lookup_late(self, request_id: RequestId) -> None:
        """Note that nobody waits for the answer of a look-up any more: its request goes on without the store.

        Mutates: notes about the look-up.
        """
        record = self._records[request_id]
        record.pending, record.barred = False, True

    def expire(self, now_s: float) -> list[Request]:
        """Return the requests whose load took too long: they go on by themselves, without any computed token.

        Their jobs keep their blocks until they report, so the requests get other ones.

        Args:
            now_s: monotonic seconds.

        Mutates: ``request.kv``, the pools.
        """
        late: list[Request] = []
        for entry in self.ledger.jobs:
            if entry.deadline_s > now_s or entry.job.job_id not in self._loads:
                continue
            request = self._loads.pop(entry.job.job_id)
            self._records[request.request_id].barred = True
            self._kv.release(request.kv)
            self.expired_loads += 1
            late.append(request)
        return late

    def resumed(self, request: Request) -> None:
        """Note that a request that came back with blocks has a slot, or has lost them: it is like any other now.

        Mutates: the list of those that hold blocks.
        """
        self._arrived.pop(request.request_id, None)

    def finished(self, request: Request) -> None:
        """Note the end of a request in any state: blocks that it holds without a slot are freed, a job keeps its own.

        Mutates: ``request.kv``, the pools.
        """
        job_id = next((job_id for job_id, waiting in self._loads.items() if waiting is request), None)
        if job_id is not None:
            del self._loads[job_id]
            self._kv.release(request.kv)
        elif self._arrived.pop(request.request_id, None) is not None:
            self._kv.release(request.kv)
        record = self._records.pop(request.request_id, None)
        if record is not None and record.asked:
            self._connector.request_finished(request.request_id)

    def _ask_until_s(self, record: _Record) -> float:
        return (record.asked_s or 0.0) + self._lookup_timeout_s

    def _ask(self, request: Request, local_tokens: int) -> int | None:
        unit, hashes = self._kv.hash_tokens, request.kv.hashes
        # The last token is always computed here, because logits come from computing.
        limit_tokens = max(local_tokens, min(len(request.token_ids) - 1, len(hashes) * unit) // unit * unit)
        tokens = self._connector.lookup(request.request_id, hashes, local_tokens, limit_tokens)
        invariant(
            tokens is None or (0 <= tokens <= limit_tokens - local_tokens and tokens % unit == 0),
            f"the connector offers {tokens} tokens from {local_tokens} to {limit_tokens} in units of {unit}",
        )
        return tokens

    def _local(self, request: Request) -> tuple[Hit, bool]:
        """Return what is here, and whether a recurrent state is missing at its end."""
        recurrent = [index for index, kind in enumerate(self._kinds) if kind == "recurrent"]
        keeping = [index for index, kind in enumerate(self._kinds) if kind not in ("recurrent", "cross")]
        if not recurrent or not keeping or not self._connector.capabilities.divergent_hits:
            return self._kv.find_hit(request.kv, request.token_ids), False
        parts = self._kv.group_hits(request.kv, request.token_ids)
        tokens = parts[keeping[0]].tokens
        states_tokens = [parts[index].tokens for index in recurrent]
        # A deeper state proves that blocks before it are gone; groups that disagree cannot be cut to one another.
        if max(states_tokens) > tokens or any(parts[index].tokens != tokens for index in keeping):
            return self._kv.find_hit(request.kv, request.token_ids), False
        # What needs nothing of the beginning has a hit of any length; here all must have one.
        for index, kind in enumerate(self._kinds):
            if kind == "cross":
                parts[index] = GroupHit(tokens, [])
        return Hit(tokens, parts, 0), min(states_tokens) < tokens

    def _cut(self, hit: Hit, tokens: int) -> Hit:
        """Return the first tokens of a hit, to be continued by a load. The hit itself is not touched.

        Tables are cut at whole blocks, places without a block stay; no block is left to be copied, and no recurrent
        state: the load brings the one of its end. Only such a group may be shorter than ``tokens``.
        """
        parts: list[GroupHit] = []
        for part, layout, kind in zip(hit.parts, self._groups, self._kinds, strict=True):
            if kind == "recurrent":
                parts.append(NO_GROUP_HIT)
            elif kind == "cross":
                parts.append(GroupHit(tokens, []))
            else:
                blocks = tokens // layout.block_tokens
                invariant(
                    tokens % layout.block_tokens == 0 and len(part.table) >= blocks,
                    f"group {layout.group}: a hit of {len(part.table)} blocks of {layout.block_tokens} is cut to "
                    f"{tokens} tokens",
                )
                parts.append(GroupHit(tokens, part.table[:blocks]))
        return Hit(tokens, parts, 0)


def _targets(
    layout: GroupLayout, kind: str, table: Sequence[BlockId], start_tokens: int, end_tokens: int
) -> list[BlockId]:
    """Return the blocks of a group that a load fills: the state, blocks of the range, or none (encoder part)."""
    if kind == "recurrent":
        return list(table)
    if kind == "cross":
        return []
    return list(table[start_tokens // layout.block_tokens : -(-end_tokens // layout.block_tokens)])

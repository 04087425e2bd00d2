"""Invariants of design section 5, checked from outside after each step.

Must not repair or change anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.events import AllBlocksCleared, BlockStored, KvEvent
from headrace.sched.request import Request, RequestState
from headrace.sched.scheduler import Scheduler
from headrace.sim.device import FakeDevice, SimFault, demand
from headrace.sim.oracle import ROOT_CONTENT, next_content
from headrace.types.outputs import SchedulerStats


def check_blocks(scheduler: Scheduler) -> None:
    """References = owners; free + used = total; the null block is nobody's; sharing only of equal beginnings."""
    for index, group in enumerate(scheduler.kv.groups):
        pool = group.pool
        owners: Counter[BlockId] = Counter()
        users: defaultdict[BlockId, list[tuple[int, Request]]] = defaultdict(list)
        for request in scheduler.running:
            table = request.kv.tables[index]
            demand(len(set(table)) == len(table), f"{request.request_id} has a block twice: {table}")
            for place, block in enumerate(table):
                owners[block] += 1
                users[block].append((place, request))
        demand(NULL_BLOCK not in owners, "a request owns the null block")
        free = pool.free_list()
        idle = set(free)
        demand(len(idle) == len(free) and NULL_BLOCK not in idle, f"broken free list {free}")
        for block in pool.block_ids():
            references = pool.references(block)
            # Texts are made only for a failure: these loops are most of the simulator's time.
            if references != owners[block]:
                raise SimFault(f"block {block}: {references} references, {owners[block]} owners")
            if (block in idle) != (references == 0):
                raise SimFault(f"block {block} free: {block in idle}, {references} references")
        demand(len(free) + len(owners) == pool.total_blocks == pool.free_blocks + len(owners), "free + used != total")
        for block, sharers in users.items():
            _check_sharing(block, sharers, group.block_tokens)


def _check_sharing(block: BlockId, sharers: list[tuple[int, Request]], block_tokens: int) -> None:
    place, first = sharers[0]
    end = (place + 1) * block_tokens
    for other_place, other in sharers[1:]:
        same = other_place == place and other.token_ids[:end] == first.token_ids[:end]
        demand(same and other.kv.extras == first.kv.extras, f"block {block} shared by different prefixes")


def check_requests(scheduler: Scheduler, device_slots: int) -> SchedulerStats:
    """Only running requests own slots and blocks; progress counters are in order. Returns the scheduler's figures."""
    running, waiting = scheduler.running, scheduler.waiting
    slots = [request.slot for request in running]
    demand(len(set(slots)) == len(slots) <= device_slots and None not in slots, f"slots {slots}")
    for request in running:
        demand(request.state is RequestState.RUNNING, f"{request.request_id} is {request.state} among the running")
        in_order = request.computed_tokens <= request.planned_tokens <= request.known_tokens
        demand(in_order, f"{request.request_id}: computed {request.computed_tokens}, planned {request.planned_tokens}")
        demand(len(request.token_ids) <= request.limit_tokens, f"{request.request_id} is longer than allowed")
    keys = [request.order_key for request in waiting]
    demand(keys == sorted(keys), "the queue is out of order")
    for request in waiting:
        demand(request.state in (RequestState.WAITING, RequestState.PREEMPTED), f"{request.state} in the queue")
        demand(request.slot is None and not any(request.kv.tables), f"{request.request_id} waits and owns something")
    stats = scheduler.stats()
    demand((stats.running, stats.waiting) == (len(running), len(waiting)), "stats disagree")
    return stats


def check_no_starvation(
    scheduler: Scheduler, *, budget_left_tokens: int, max_num_seqs: int, preempted: bool, watermark: float
) -> None:
    """Nobody waits while blocks, slots and budget for him are free, counting the hit that he would find now.

    Args:
        scheduler: just after `schedule`.
        budget_left_tokens: of the step that was planned.
        max_num_seqs: requests that may run at once.
        preempted: somebody was preempted in this step; then nobody may start.
        watermark: share of the blocks that a start must leave free.

    Raises:
        SimFault: the head of the queue waits for nothing.
    """
    running, waiting = scheduler.running, scheduler.waiting
    if not waiting or preempted:
        return
    demand(bool(running), "requests wait and none runs")
    if not budget_left_tokens or len(running) >= max_num_seqs:
        return
    head = waiting[0]
    hit = scheduler.kv.find_hit(head.kv, head.token_ids)
    if head.wants_prompt_logprobs:
        hit = scheduler.kv.no_hit()
    for index, group in enumerate(scheduler.kv.groups):

        def missing(request: Request, index: int = index, size: int = group.block_tokens) -> int:
            return max(0, -(-request.known_tokens // size) - len(request.kv.tables[index]))

        in_use = sum(group.pool.references(block) > 0 for block in hit.parts[index].table)
        promised = sum(missing(request) for request in running) + int(watermark * group.pool.total_blocks)
        if missing(head) - in_use + promised > group.pool.free_blocks:
            return
    demand(False, f"{head.request_id} waits although everything for it is free")


class EventReplay:
    """Follows the cache events as a router would, and knows which content each hash stands for."""

    def __init__(self, num_groups: int) -> None:
        self.contents: list[dict[bytes, tuple[int, ...]]] = [{} for _ in range(num_groups)]
        # Content at the end of every prefix ever announced: a block may outlive its parent's eviction.
        self._last_content: dict[bytes, int] = {}

    def take(self, events: list[KvEvent]) -> None:
        """Follow the events, in order."""
        for event in events:
            known = self.contents[event.group]
            if isinstance(event, AllBlocksCleared):
                known.clear()
            elif isinstance(event, BlockStored):
                demand(event.block_hash not in known, "a hash is announced twice")
                demand(len(event.token_ids) == event.block_tokens, "an event with too few tokens")
                known[event.block_hash] = self._contents(event)
            else:
                demand(event.block_hash in known, "a hash is removed that nobody announced")
                del known[event.block_hash]

    def _contents(self, event: BlockStored) -> tuple[int, ...]:
        if event.parent_hash is None:
            content = ROOT_CONTENT
        else:
            demand(event.parent_hash in self._last_content, "the parent of a stored block was never announced")
            content = self._last_content[event.parent_hash]
        contents = []
        for token_id in event.token_ids:
            content = next_content(content, token_id)
            contents.append(content)
        self._last_content[event.block_hash] = content
        return tuple(contents)

    def check(self, scheduler: Scheduler, device: FakeDevice) -> None:
        """Replayed events equal the pool, and every block that can be hit has the right content on the device."""
        for index, group in enumerate(scheduler.kv.groups):
            pool = group.pool
            demand(set(self.contents[index]) == pool.cached_hashes(), "replayed events differ from the pool")
            cached = 0
            for number in pool.block_ids():
                hashes = pool.hashes_of(number)
                if not hashes:
                    continue
                block_hash = hashes[-1]
                cached += 1
                for offset, content in enumerate(self.contents[index][block_hash]):
                    cell = device.cell(index, BlockId(number), offset)
                    demand(cell is not None and cell[0] == content, f"block {number} is published with {cell}")
            demand(cached == pool.cached_blocks, "count of cached blocks")

"""Invariants of design section 5, checked from outside after each step.

Must not repair or change anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.config.engine import SchedulerConfig
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.encoder_cache import EncoderCache
from headrace.sched.request import REMOTE, Request, RequestState
from headrace.sim.cells import SimFault, demand
from headrace.tiers.ledger import OpenJob


def check_owners(kv: KvCoordinator, holders: Sequence[Request], jobs: Iterable[OpenJob]) -> None:
    """References = owners, and the null block is nobody's.

    Args:
        kv: all pools.
        holders: requests that may hold blocks.
        jobs: open ones.
    """
    # This runs after every call of the scheduler, so the counting is left to the interpreter.
    tables = [table for request in holders for table in request.kv.tables]
    counted = Counter(chain.from_iterable(tables))
    for request in holders:
        for save in request.kv.saves:
            counted.update(block for _, block in save.blocks)
    for entry in jobs:
        for blocks in entry.job.blocks:
            counted.update(set(blocks))
    counted.pop(NULL_BLOCK, None)
    references = _owners(kv)
    if counted != references:
        wrong = BlockId(min(b for b in [*counted, *references] if counted[BlockId(b)] != references.get(b, 0)))
        raise SimFault(f"block {wrong}: {references.get(wrong, 0)} references, {counted[wrong]} owners")
    live = sum(pool.live_blocks for pool in kv.memory.pools)
    demand(live == len(counted), f"{live} blocks are not free, {len(counted)} are used")


def _owners(kv: KvCoordinator) -> dict[int, int]:
    """Return the number of owners of each block that has some."""
    owners = kv.memory.owners
    counts = owners.items() if isinstance(owners, Mapping) else enumerate(owners)
    return {block: count for block, count in counts if count}


def check_pools(kv: KvCoordinator) -> list[int]:
    """Free + used = total in each pool, what is idle is cached, and each extent has one owner.

    Returns:
        The owner of each extent; -1 for none.
    """
    owners = [-1] * kv.memory.layout.num_extents
    memory = kv.memory
    references, layout = memory.owners, memory.layout
    extents: list[int] = []
    for index, pool in enumerate(memory.pools):
        # Asking for the extents takes empty ones back, so it comes first.
        own = memory.extents_of(index)
        blocks, free = pool.block_ids(), pool.free_list()
        demand(len(set(blocks)) == len(blocks) == pool.total_blocks, f"group {index} has {blocks}")
        idle = set(free)
        demand(len(idle) == len(free) == pool.free_blocks, f"group {index}: broken free list {free}")
        demand(idle <= set(blocks) and NULL_BLOCK not in idle, f"group {index}: strange blocks are free")
        cached = 0
        for block in blocks:
            demand((block in idle) == (references[block] == 0), f"block {block}: {references[block]} references")
            cached += bool(pool.hashes_of(block))
        demand(cached == pool.cached_blocks, f"group {index}: {cached} blocks are cached, not {pool.cached_blocks}")
        for block in pool.idle_list():
            demand(bool(pool.hashes_of(block)), f"group {index}: idle block {block} caches nothing")
        extents += own
        for extent in own:
            owners[extent] = index
        if len(memory.pools) > 1:
            at = {(block - layout.null_granules) // layout.extent_granules for block in blocks}
            demand(at <= set(own), f"group {index} has blocks in extents {at} and owns {own}")
    if len(memory.pools) > 1:
        demand(len(set(extents)) == len(extents), f"an extent has two owners: {extents}")
        lent = len(extents) + memory.unassigned_extents
        demand(lent == layout.num_extents, f"{lent} of {layout.num_extents} extents are accounted for")
    usage = memory.usage()
    parts = (usage.live_bytes, usage.cached_bytes, usage.plain_bytes, usage.unassigned_bytes, usage.lost_bytes)
    demand(min(parts) >= 0 and sum(parts) == usage.total_bytes, f"the bytes do not add up: {usage}")
    return owners


def check_idle(kv: KvCoordinator) -> None:
    """Nobody holds anything."""
    for index, pool in enumerate(kv.memory.pools):
        demand(pool.live_blocks == 0, f"blocks leaked: {pool.live_blocks} of group {index}")
    demand(not _owners(kv), "a block has owners although nobody is there")


def check_requests(running: Sequence[Request], waiting: Sequence[Request], config: SchedulerConfig) -> None:
    """Only who runs owns a slot; who waits in the queue holds nothing; progress counters are in order."""
    slots = {request.slot for request in running}
    good = len(slots) == len(running) <= config.max_num_seqs and None not in slots
    demand(good, f"slots {slots}")
    drafts, state = config.speculative_tokens, RequestState.RUNNING
    for request in running:
        in_order = request.computed_tokens <= request.planned_tokens <= request.known_tokens + drafts
        if not in_order or len(request.token_ids) > request.limit_tokens:
            raise SimFault(f"{request.request_id}: {request.computed_tokens}, {request.planned_tokens} tokens")
        if request.state is not state:
            raise SimFault(f"{request.request_id} is {request.state} among the running")
    order = (-math.inf, 0)
    for request in waiting:
        if request.slot is not None or request.state is state or order > request.order_key:
            raise SimFault(f"{request.request_id} is {request.state} with slot {request.slot}, {request.order_key}")
        if request.kv.tables[0] and request.state not in REMOTE:
            raise SimFault(f"{request.request_id} is {request.state} and holds blocks")
        order = request.order_key


def check_encoder(cache: EncoderCache, running: Sequence[Request]) -> None:
    """Rows of encoder outputs add up, and only those hold some who have a slot."""
    used = cache.used_rows
    if not used and not cache.identifiers:
        return
    good = 0 <= used <= cache.capacity_rows and cache.resident_rows <= cache.capacity_rows
    demand(good, f"encoder cache: {used} used, {cache.resident_rows} resident of {cache.capacity_rows}")
    nobody = used and not any(cache.uses_of(request.request_id) for request in running)
    demand(not nobody, f"{used} encoder rows are used by nobody")

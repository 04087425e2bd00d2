"""Who loses its blocks when memory runs out: the cheapest to compute again, among those later in order.

The first in order is never chosen while there is anybody else, so it always goes on, ends, and another is first:
progress is certain. Must not take anything from anybody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.pool import BlockPool
from headrace.sched.request import Request


def choose_victim(
    needy: Request, holders: Iterable[Request], missing_blocks: Sequence[int], kv: KvCoordinator
) -> Request | None:
    """Return the request that should lose its blocks so that another gets some.

    The measure is tokens to compute again for each granule that helps: memory beyond what is missing helps nobody, and
    a beginning that others share stays where it is, so it costs nothing and gives nothing. Among equals the last in
    order goes. Only if nobody later has a block of its own, the last in order goes all the same: those who share blocks
    among themselves give them back one after the other.

    Args:
        needy: who needs memory.
        holders: requests with blocks that can be taken; ``needy`` among them or not.
        missing_blocks: per group, what it lacks.
        kv: their tables; only looked at.

    Returns:
        One later in order, or None if there is none.
    """
    worst: tuple[bool, float, tuple[float, float]] | None = None
    victim: Request | None = None
    for request in holders:
        if request.order_key <= needy.order_key:
            continue
        gain = useful_granules(request, missing_blocks, kv)
        cost = recompute_tokens(request, kv)
        key = (not gain, cost / gain if gain else 0.0, (-request.order_key[0], -request.order_key[1]))
        if worst is None or key < worst:
            worst, victim = key, request
    return victim


def useful_granules(request: Request, missing_blocks: Sequence[int], kv: KvCoordinator) -> int:
    """Return the granules that a request alone owns, counted no further than what is missing.

    Args:
        request: one with blocks.
        missing_blocks: per group; where nothing is missing, blocks of the group help through their extent only, so a
            single one is counted when no other group gains.
        kv: its tables; only looked at.
    """
    gain = spare = 0
    for pool, table, missing in zip(kv.memory.pools, request.kv.tables, missing_blocks, strict=True):
        own = _own_blocks(pool, table, missing or 1)
        if missing:
            gain += own * pool.layout.block_granules
        else:
            spare = max(spare, own)
    return gain or spare


def recompute_tokens(request: Request, kv: KvCoordinator) -> int:
    """Return how many tokens a request would have to compute again: those in front of which nobody else holds blocks.

    What the prefix cache keeps of its own blocks is not counted as kept: memory is short, so they are the next to go.
    """
    shared_tokens: int | None = None
    for group, table in zip(kv.groups, request.kv.tables, strict=True):
        if group.keeps_all and group.block_tokens:
            references = group.pool.references
            own_from = bisect_left(range(len(table)), True, key=lambda place: references(table[place]) < 2)
            tokens = own_from * group.block_tokens
            shared_tokens = tokens if shared_tokens is None else min(shared_tokens, tokens)
    return max(0, request.planned_tokens - (shared_tokens or 0))


def _own_blocks(pool: BlockPool, table: Sequence[BlockId], most: int) -> int:
    """Return how many blocks at the end of a table have no other owner, counted up to ``most``."""
    count = 0
    for block in reversed(table):
        if count == most or block == NULL_BLOCK or pool.references(block) > 1:
            break
        count += 1
    return count

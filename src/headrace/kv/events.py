"""What changed in the prefix cache, for routers and tiers: recorded by the pools, taken by the coordinator's caller.

An event is about one hash unit of one group, not about a block: it is sent when the first block with this content
appears and when the last one is gone, so that replaying the events gives exactly the set of (group, hash) that can be
hit. A unit describes itself whatever its group keeps: a checkpoint of a recurrent state names the last tokens before
it, the incomplete last block of a sequence is one event for each unit in it. Must not know publishers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.ids import GroupId
from headrace.kv.prefix_hash import ExtraKey
from headrace.types.cache_specs import CacheSpec, ChunkedLocalSpec, SlidingWindowSpec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """A prefix can now be hit in one group.

    Attributes:
        group: index of the group.
        kind: of its spec: "full", "sliding", "recurrent" and so on.
        block_hash: stands for the whole prefix that ends with this unit.
        parent_hash: hash of the prefix before it; None for the first unit. The parent itself need not be in the cache
            of this group: a window moves on, a checkpoint stands alone.
        token_ids: the unit's own tokens.
        block_tokens: their number: the hash unit of the engine, not the tokens of a block in memory.
        window_tokens: what the group reads back at most (window or chunk); 0 for groups without such a bound.
        extras: the unit's extra keys, each with its kind.
    """

    group: GroupId
    kind: str
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    block_tokens: int
    window_tokens: int = 0
    extras: list[ExtraKey] = []


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """A prefix can no longer be hit in this group."""

    group: GroupId
    block_hash: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Nothing of this group can be hit any more."""

    group: GroupId


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def window_tokens_of(spec: CacheSpec) -> int:
    """Return `BlockStored.window_tokens` of a group with this spec."""
    if isinstance(spec, SlidingWindowSpec):
        return spec.window_tokens
    return spec.chunk_tokens if isinstance(spec, ChunkedLocalSpec) else 0


def parents_first(events: Sequence[BlockStored]) -> list[BlockStored]:
    """Order the events of one group so that each comes after its parent, if that is among them.

    Args:
        events: of one group, one a hash.

    Returns:
        The same events; chains stay together.
    """
    by_hash = {event.block_hash: event for event in events}
    ordered: dict[bytes, BlockStored] = {}
    for event in events:
        chain: list[BlockStored] = []
        step: BlockStored | None = event
        while step is not None and step.block_hash not in ordered:
            chain.append(step)
            step = by_hash.get(step.parent_hash) if step.parent_hash is not None else None
        for link in reversed(chain):
            ordered[link.block_hash] = link
    return list(ordered.values())

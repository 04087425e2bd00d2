"""What changed in the prefix cache, for routers and tiers: recorded by the pool, taken by the coordinator's caller.

An event is about a hash, not about a block: it is sent when the first block with this content appears and when the
last one is gone, so that replaying the events gives exactly the set of cached hashes. Must not know publishers.
"""

from __future__ import annotations

import msgspec

from headrace.base.ids import GroupId


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """A prefix can now be hit.

    Attributes:
        group: group of the block.
        block_hash: stands for the whole prefix that ends with this block.
        parent_hash: hash of the prefix before it; None for the first block.
        token_ids: the block's own tokens.
        block_tokens: their number.
    """

    group: GroupId
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    block_tokens: int


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """A prefix can no longer be hit."""

    group: GroupId
    block_hash: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Nothing of this group can be hit any more."""

    group: GroupId


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

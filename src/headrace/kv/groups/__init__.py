"""One module a kind of cache spec: how a group of layers finds hits, grows, and frees what it no longer reads.

Two kinds take no memory and so have no group and no table: a **shared** layer reads the table of another layer's group
(`KvLayout.shared_layers`), a layer of kind **none** keeps nothing. Must not look at other groups; that is the
coordinator's work.
"""

from __future__ import annotations

from headrace.base.errors import InvariantError
from headrace.kv.groups.base import NEVER_TOKENS, NO_GROUP_HIT, CacheGroup, GroupHit, TokenGroup
from headrace.kv.groups.chunked import ChunkedGroup
from headrace.kv.groups.compressed import CompressedGroup
from headrace.kv.groups.cross import CrossGroup
from headrace.kv.groups.full import FullGroup
from headrace.kv.groups.index_keys import IndexKeysGroup
from headrace.kv.groups.latent import LatentGroup
from headrace.kv.groups.recurrent import RecurrentGroup
from headrace.kv.groups.sliding import SlidingGroup
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    LatentSpec,
    RecurrentSpec,
    SlidingWindowSpec,
    kind_of,
)


def make_group(layout: GroupLayout, pool: BlockPool, *, hash_tokens: int) -> CacheGroup:
    """Return the manager of a group, chosen by its spec.

    Args:
        layout: of the group.
        pool: its blocks.
        hash_tokens: tokens under one prefix hash; divides the group's block.

    Raises:
        InvariantError: a kind that takes no memory, or sizes that do not fit.
    """
    spec = layout.spec
    match spec:
        case FullAttentionSpec():
            return FullGroup(layout, pool, hash_tokens=hash_tokens)
        case LatentSpec():
            return LatentGroup(layout, pool, hash_tokens=hash_tokens)
        case SlidingWindowSpec():
            return SlidingGroup(layout, spec, pool, hash_tokens=hash_tokens)
        case ChunkedLocalSpec():
            return ChunkedGroup(layout, spec, pool, hash_tokens=hash_tokens)
        case CompressedSpec():
            return CompressedGroup(layout, spec, pool, hash_tokens=hash_tokens)
        case IndexKeysSpec():
            return IndexKeysGroup(layout, spec, pool, hash_tokens=hash_tokens)
        case RecurrentSpec():
            return RecurrentGroup(layout, pool, hash_tokens=hash_tokens)
        case CrossAttentionSpec():
            return CrossGroup(layout, pool)
    raise InvariantError(f"group {layout.group}: the kind {kind_of(spec)!r} takes no memory and has no group")


__all__ = [
    "NEVER_TOKENS",
    "NO_GROUP_HIT",
    "CacheGroup",
    "ChunkedGroup",
    "CompressedGroup",
    "CrossGroup",
    "FullGroup",
    "GroupHit",
    "IndexKeysGroup",
    "LatentGroup",
    "RecurrentGroup",
    "SlidingGroup",
    "TokenGroup",
    "make_group",
]

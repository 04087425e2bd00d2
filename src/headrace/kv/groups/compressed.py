"""Compressed attention: one record for every few tokens, written when the last of them is computed.

The raw tokens of the unfinished record are a sliding group of their own, so a hit of n tokens needs floor(n / ratio)
records here. Must not free anything before the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.kv.groups.base import GroupHit, TokenGroup
from headrace.kv.groups.prefix import longest_prefix
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import CompressedSpec, GroupLayout


class CompressedGroup(TokenGroup):
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    def __init__(self, layout: GroupLayout, spec: CompressedSpec, pool: BlockPool, *, hash_tokens: int) -> None:
        """Make the manager; see `TokenGroup`. The block is a multiple of the ratio, so no record spans two blocks."""
        super().__init__(layout, pool, hash_tokens=hash_tokens)
        invariant(
            layout.block_tokens % spec.ratio_tokens == 0,
            f"group {layout.group}: {layout.block_tokens} tokens a block, {spec.ratio_tokens} a record",
        )
        self._ratio_tokens = spec.ratio_tokens

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Walk left to right until the first missing record; a longer hit is cut."""
        return longest_prefix(self, hashes, max_tokens, longer, self._ratio_tokens)

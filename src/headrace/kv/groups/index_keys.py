"""Index keys, by which a sparse layer chooses what it reads: one for every token or every few, all of them kept.

They are a group beside the records they point at, so a hit always has both. Must not free anything before the
sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import invariant
from headrace.kv.groups.base import GroupHit, TokenGroup
from headrace.kv.groups.prefix import longest_prefix
from headrace.kv.pool import BlockPool
from headrace.types.cache_specs import GroupLayout, IndexKeysSpec


class IndexKeysGroup(TokenGroup):
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    def __init__(self, layout: GroupLayout, spec: IndexKeysSpec, pool: BlockPool, *, hash_tokens: int) -> None:
        """Make the manager; see `TokenGroup`. The block is a multiple of the ratio, so no key spans two blocks."""
        super().__init__(layout, pool, hash_tokens=hash_tokens)
        invariant(
            layout.block_tokens % spec.ratio_tokens == 0,
            f"group {layout.group}: {layout.block_tokens} tokens a block, {spec.ratio_tokens} a key",
        )
        self._ratio_tokens = spec.ratio_tokens

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Walk left to right until the first missing key; a longer hit is cut."""
        return longest_prefix(self, hashes, max_tokens, longer, self._ratio_tokens)

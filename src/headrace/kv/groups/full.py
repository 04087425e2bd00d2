"""Full attention: every token is kept and read, so a table has a block for every position.

Must not free anything before the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kv.groups.base import GroupHit, TokenGroup
from headrace.kv.groups.prefix import longest_prefix


class FullGroup(TokenGroup):
    """See `headrace.kv.groups.base.CacheGroup` for the contract of each method."""

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None = None) -> GroupHit:
        """Walk left to right until the first miss; a longer hit is cut."""
        return longest_prefix(self, hashes, max_tokens, longer)

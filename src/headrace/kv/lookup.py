"""The longest beginning that all groups have: a fixed point over what each of them has. Reads pools, changes nothing.

Each group keeps or shortens the candidate until none does. A group is asked again for a shorter candidate, never
trimmed: a window or a state at another end lies in other blocks. (A group that keeps all tokens cuts its own hit.)
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kv.groups import NO_GROUP_HIT, CacheGroup, CrossGroup, GroupHit, RecurrentGroup
from headrace.kv.sequence import Hit


class PrefixLookup:
    """Look-ups over the groups of one layout."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        """Make a look-up.

        Args:
            groups: all groups, in order.
        """
        self._groups = groups
        states = [index for index, group in enumerate(groups) if isinstance(group, RecurrentGroup)]
        tokens = [index for index in range(len(groups)) if index not in states]
        # Those first that keep all tokens: they shorten the candidate at the first miss and are cut from then on.
        self._token_order = sorted(tokens, key=lambda index: not groups[index].keeps_all)
        self._order = self._token_order + states
        self._has_states = bool(states)
        self._proving = [index for index in tokens if not isinstance(groups[index], CrossGroup)]

    def none(self) -> Hit:
        """Return the hit of no tokens."""
        return Hit(0, [NO_GROUP_HIT] * len(self._groups))

    def longest(self, hashes: Sequence[bytes], max_tokens: int) -> Hit:
        """Return the longest hit that all groups share.

        Args:
            hashes: prefix hashes of the sequence, at least up to ``max_tokens``.
            max_tokens: a multiple of the hash unit.
        """
        parts: list[GroupHit | None] = [None] * len(self._groups)
        shared_tokens = tokens = self._agree(self._token_order, hashes, max_tokens, parts)
        boundary_tokens = 0
        if self._has_states and shared_tokens:
            # A group may need nothing at some lengths (chunk boundaries); only blocks prove that this was seen before.
            seen = any(part.tail or any(part.table) for part in (parts[i] for i in self._proving) if part is not None)
            tokens = self._agree(self._order, hashes, shared_tokens, parts)
            boundary_tokens = shared_tokens if seen and tokens < shared_tokens else 0
        if not tokens:
            return Hit(0, self.none().parts, boundary_tokens)
        return Hit(tokens, [part or NO_GROUP_HIT for part in parts], boundary_tokens)

    def of_each(self, hashes: Sequence[bytes], max_tokens: int) -> list[GroupHit]:
        """Return the longest hit of each group by itself."""
        return [group.longest_hit(hashes, max_tokens) for group in self._groups]

    def _agree(self, order: Sequence[int], hashes: Sequence[bytes], tokens: int, parts: list[GroupHit | None]) -> int:
        """Shorten ``tokens`` until every group of ``order`` has just that; write their hits into ``parts``."""
        settled = False
        while tokens and not settled:
            settled = True
            for index in order:
                part = parts[index]
                if part is not None and part.tokens == tokens:
                    continue
                part = parts[index] = self._groups[index].longest_hit(hashes, tokens, part)
                settled = settled and part.tokens == tokens
                tokens = part.tokens
        return tokens

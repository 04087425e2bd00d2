"""The only owner of block tables: finds hits over all groups, lets sequences grow, publishes, and frees.

Every operation is all or nothing over the groups. Must not know requests' states, budgets or policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import invariant
from headrace.base.ids import BlockId
from headrace.kv.events import KvEvent
from headrace.kv.groups import CacheGroup, make_group
from headrace.kv.prefix_hash import HashExtras, extend_block_hashes
from headrace.types.cache_specs import KvLayout

_NEVER_TOKENS = 1 << 62


class SequenceKv:
    """The KV of one sequence, changed by the coordinator alone.

    Attributes:
        tables: block table per group; empty unless the sequence runs.
        hashes: prefix hashes known so far. They depend on the tokens only, so they outlive the blocks.
        salt: tenant separation, or None.
        covered_tokens: tokens for which every table has room.
        published_blocks: per group, how many leading blocks are published (or were hits).
        advance_at_tokens: computed tokens at which `KvCoordinator.advance` has something to do.
    """

    __slots__ = ("advance_at_tokens", "covered_tokens", "hashes", "published_blocks", "salt", "tables")

    def __init__(self, num_groups: int, *, salt: str | None, hashes: Sequence[bytes] = ()) -> None:
        self.tables: list[list[BlockId]] = [[] for _ in range(num_groups)]
        self.hashes: list[bytes] = list(hashes)
        self.salt = salt
        self.covered_tokens = 0
        self.published_blocks = [0] * num_groups
        self.advance_at_tokens = _NEVER_TOKENS


@dataclass(frozen=True)
class Hit:
    """The longest beginning that every group has in its cache.

    Attributes:
        tokens: its length; a multiple of every group's block.
        tables: its blocks per group. Not pinned: use it before anything else is allocated.
    """

    tokens: int
    tables: list[list[BlockId]]


class KvCoordinator:
    """Block tables of all sequences over all groups."""

    def __init__(self, layout: KvLayout, *, enable_prefix_caching: bool, record_events: bool = False) -> None:
        """Make empty pools.

        Args:
            layout: groups and their blocks.
            enable_prefix_caching: without it nothing is hashed, published or found.
            record_events: record cache events for `take_events`.
        """
        invariant(len(layout.groups) > 0, "a KV layout needs at least one group")
        sizes_tokens = [group.block_tokens for group in layout.groups]
        self.hash_tokens = math.gcd(*sizes_tokens)
        self._alignment_tokens = math.lcm(*sizes_tokens)
        self._caching = enable_prefix_caching
        self.groups: list[CacheGroup] = [
            make_group(group, hash_tokens=self.hash_tokens, record_events=record_events) for group in layout.groups
        ]
        self._watched: frozenset[bytes] = frozenset()
        self.watched_published = False
        self._freeing_groups = [index for index, group in enumerate(self.groups) if not group.keeps_all]

    def new_sequence(self, *, salt: str | None, hashes: Sequence[bytes] = ()) -> SequenceKv:
        """Return the KV of a sequence that holds no block yet.

        Args:
            salt: tenant separation.
            hashes: prefix hashes that the front end computed, one per ``hash_tokens`` tokens.
        """
        return SequenceKv(len(self.groups), salt=salt, hashes=hashes)

    def find_hit(self, sequence: SequenceKv, token_ids: Sequence[int]) -> Hit:
        """Find the longest cached beginning that all groups share.

        At least one token is left to compute, because logits come from computing. Each group keeps or shortens the
        candidate until none does; a group is asked again, never trimmed, since a shorter hit may need other blocks.

        Args:
            sequence: its hashes are extended to all full blocks of ``token_ids``.
            token_ids: all known tokens, at least one.

        Returns:
            The hit, maybe of no tokens.

        Mutates: ``sequence.hashes``.
        """
        if not self._caching:
            return self.no_hit()
        extend_block_hashes(sequence.hashes, token_ids, self.hash_tokens, extras=HashExtras(salt=sequence.salt))
        tokens = self._align(len(token_ids) - 1)
        while tokens:
            tables: list[list[BlockId]] = []
            longest_tokens = tokens
            for group in self.groups:
                table = group.longest_hit(sequence.hashes, tokens)
                tables.append(table)
                tokens = self._align(len(table) * group.block_tokens)
            if tokens == longest_tokens:
                return Hit(tokens, tables)
        return self.no_hit()

    def no_hit(self) -> Hit:
        """Return the hit of no tokens."""
        return Hit(0, [[] for _ in self.groups])

    def demand_blocks(self, hit: Hit, tokens: int) -> list[int]:
        """Return per group how many free blocks a sequence of ``tokens`` tokens takes.

        Args:
            hit: its cached beginning. Hit blocks that lie on the free list count: pinning takes them off.
            tokens: length of the sequence.
        """
        return [
            group.blocks_needed(len(table), tokens) + group.pool.idle(table)
            for group, table in zip(self.groups, hit.tables, strict=True)
        ]

    def has_free(self, demand_blocks: Sequence[int], kept_blocks: Sequence[int]) -> bool:
        """Return whether every group has so many free blocks.

        Args:
            demand_blocks: per group, blocks to be taken.
            kept_blocks: per group, free blocks that must be left over.
        """
        for group, demand, kept in zip(self.groups, demand_blocks, kept_blocks, strict=True):
            if demand + kept > group.pool.free_blocks:
                return False
        return True

    def watch(self, hashes: Sequence[bytes]) -> None:
        """Note from now on in `watched_published` whether a block with one of these hashes is published.

        Until then no sequence with these hashes finds a longer hit, or one with more blocks in use, unless another
        one that shares them is started.

        Mutates: the watch; there is one.
        """
        self._watched = frozenset(hashes)
        self.watched_published = False

    def start(self, sequence: SequenceKv, hit: Hit, tokens: int) -> None:
        """Give a sequence its hit and room for ``tokens`` tokens in all.

        Two phases: the hits of **all** groups are pinned before any block is handed out. Otherwise the allocation of
        one group could evict a hit that is not pinned yet.

        Mutates: ``sequence``, the pools.
        Requires: the sequence holds no block; its demand was free (`has_free`) and nothing was allocated since.
        """
        invariant(not any(sequence.tables), "a sequence that holds blocks cannot be started")
        for group, table in zip(self.groups, hit.tables, strict=True):
            group.pool.touch(table)
        for index, group in enumerate(self.groups):
            table = list(hit.tables[index])
            group.allocate(table, group.blocks_needed(len(table), tokens))
            sequence.tables[index] = table
            sequence.published_blocks[index] = hit.tokens // group.block_tokens
        self._measure_room(sequence)
        self._set_next_advance(sequence)

    def grow(self, sequence: SequenceKv, tokens: int) -> list[list[BlockId]] | None:
        """Make room for ``tokens`` tokens in all.

        Returns:
            The new blocks per group, or None if some group has too few; then nothing has changed.

        Mutates: ``sequence``, the pools.
        """
        missing: list[int] = []
        for group, table in zip(self.groups, sequence.tables, strict=True):
            count_blocks = group.blocks_needed(len(table), tokens)
            if count_blocks > group.pool.free_blocks:
                return None
            missing.append(count_blocks)
        added: list[list[BlockId]] = []
        for group, table, count_blocks in zip(self.groups, sequence.tables, missing, strict=True):
            added.append(group.allocate(table, count_blocks))
        self._measure_room(sequence)
        return added

    def missing_blocks(self, sequence: SequenceKv, tokens: int) -> list[int]:
        """Return per group how many blocks the sequence lacks to hold ``tokens`` tokens."""
        return [
            group.blocks_needed(len(table), tokens) for group, table in zip(self.groups, sequence.tables, strict=True)
        ]

    def advance(self, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        """Publish the blocks that have become full, and free what no later token reads.

        Args:
            sequence: a running one.
            token_ids: its known tokens, at least ``computed_tokens`` of them.
            computed_tokens: tokens whose KV is on the device by a step whose result **has been applied**.

        Mutates: ``sequence``, the pools.
        """
        if self._caching:
            extend_block_hashes(sequence.hashes, token_ids, self.hash_tokens, extras=HashExtras(salt=sequence.salt))
            for index in range(len(self.groups)):
                self._publish(index, sequence, token_ids, computed_tokens)
        for index in self._freeing_groups:
            self.groups[index].free_behind(sequence.tables[index], computed_tokens)
        self._set_next_advance(sequence)

    def release(self, sequence: SequenceKv) -> None:
        """Give back all blocks, tail first; what is published can still be hit.

        Mutates: ``sequence``, the pools.
        """
        for index, group in enumerate(self.groups):
            group.pool.free(sequence.tables[index])
            sequence.tables[index] = []
            sequence.published_blocks[index] = 0
        self._measure_room(sequence)

    def forget(self, sequence: SequenceKv) -> None:
        """Make the whole content of a sequence unhittable, because it may be broken (non-finite values, say).

        Mutates: the caches.
        """
        for group in self.groups:
            for block_index in range(len(sequence.hashes) * self.hash_tokens // group.block_tokens):
                group.pool.forget(group.block_hash(sequence.hashes, block_index))

    def forget_idle(self) -> None:
        """Make every block unhittable that no sequence uses.

        Mutates: the caches.
        """
        for group in self.groups:
            group.pool.forget_idle()

    def take_events(self) -> list[KvEvent]:
        """Return the cache events since the last call; in order within each group.

        Mutates: the record of events.
        """
        return [event for group in self.groups for event in group.pool.take_events()]

    def _publish(self, index: int, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        group, table = self.groups[index], sequence.tables[index]
        first, end = sequence.published_blocks[index], computed_tokens // group.block_tokens
        parent = group.block_hash(sequence.hashes, first - 1) if first else None
        for block_index in range(first, end):
            block_hash = group.block_hash(sequence.hashes, block_index)
            if group.reachable(block_index, len(token_ids)):
                start_token = block_index * group.block_tokens
                content = token_ids[start_token : start_token + group.block_tokens]
                group.pool.publish(table[block_index], block_hash, parent, content)
                self.watched_published |= block_hash in self._watched
            parent = block_hash
        sequence.published_blocks[index] = max(first, end)

    def _align(self, tokens: int) -> int:
        return tokens - tokens % self._alignment_tokens

    def _measure_room(self, sequence: SequenceKv) -> None:
        covered_tokens = _NEVER_TOKENS
        for group, table in zip(self.groups, sequence.tables, strict=True):
            covered_tokens = min(covered_tokens, len(table) * group.block_tokens)
        sequence.covered_tokens = covered_tokens

    def _set_next_advance(self, sequence: SequenceKv) -> None:
        if not self._caching and not self._freeing_groups:
            return
        next_tokens = _NEVER_TOKENS
        for group, published in zip(self.groups, sequence.published_blocks, strict=True):
            next_tokens = min(next_tokens, (published + 1) * group.block_tokens)
        sequence.advance_at_tokens = next_tokens

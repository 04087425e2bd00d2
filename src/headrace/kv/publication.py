"""Making computed content hittable: the hash chain of a sequence, and which block carries which hash.

A block that is larger than the hash unit carries one hash for each complete unit in it, so that a hit may end inside
it. Must not decide when content is right: the caller passes tokens whose step is applied.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.groups import NEVER_TOKENS, CacheGroup
from headrace.kv.memory import KvMemory
from headrace.kv.prefix_hash import extend_block_hashes, unit_extras
from headrace.kv.sequence import PendingSave, SequenceKv


class Publication:
    """Publishes units of all groups of one layout, and notes when a watched one is among them."""

    def __init__(
        self, groups: Sequence[CacheGroup], memory: KvMemory, *, hash_tokens: int, root: bytes, record_events: bool
    ) -> None:
        """Make a publisher.

        Args:
            groups: all groups, in order.
            memory: where their blocks lie.
            hash_tokens: tokens under one prefix hash.
            root: start of the hash chain.
            record_events: the pools keep events, which need the tokens of each unit.
        """
        self._pools = memory.pools
        self._hash_tokens = hash_tokens
        self._root = root
        self._record_events = record_events
        # (index, hash units in a block) of the groups whose blocks can be hit by their place.
        self._placed = [
            (index, group.block_tokens // hash_tokens)
            for index, group in enumerate(groups)
            if group.reachable(0, NEVER_TOKENS, hash_tokens)
        ]
        self._watched: frozenset[bytes] = frozenset()
        self.watched_published = False

    def watch(self, hashes: Sequence[bytes]) -> None:
        """Note from now on in `watched_published` whether something with one of these hashes is published.

        Mutates: the watch; there is one.
        """
        self._watched = frozenset(hashes)
        self.watched_published = False

    def extend(self, sequence: SequenceKv, token_ids: Sequence[int]) -> None:
        """Complete the hashes of a sequence.

        Mutates: ``sequence.hashes``.
        """
        extend_block_hashes(sequence.hashes, token_ids, self._hash_tokens, extras=sequence.extras, root=self._root)

    def publish(self, sequence: SequenceKv, token_ids: Sequence[int], valid_tokens: int) -> None:
        """Publish the units that are complete within ``valid_tokens`` and not published yet.

        Args:
            sequence: holds the blocks; a place with the null block has nothing to publish.
            token_ids: its known tokens.
            valid_tokens: everything before this position is right, in every block that the sequence holds.

        Mutates: ``sequence``, the pools.
        """
        first, end = sequence.published_units, valid_tokens // self._hash_tokens
        if end <= first:
            return
        if end > len(sequence.hashes):
            self.extend(sequence, token_ids)
        for index, units_per_block in self._placed:
            table, publish, hashes = sequence.tables[index], self._pools[index].publish, sequence.hashes
            for unit in range(first, end):
                block = table[unit // units_per_block]
                if block == NULL_BLOCK:
                    continue
                if self._record_events:
                    self._publish_unit(index, block, unit, sequence, token_ids)
                else:
                    publish(block, hashes[unit], hashes[0])
        if self._watched and not self.watched_published:
            self.watched_published = not self._watched.isdisjoint(sequence.hashes[first:end])
        sequence.published_units = end

    def publish_save(self, sequence: SequenceKv, token_ids: Sequence[int], save: PendingSave) -> None:
        """Publish the checkpoints of one boundary, and give up their references.

        Args:
            sequence: of the save.
            token_ids: its known tokens; all before the boundary are hashed.
            save: its step is applied, and `publish` has been called for that: it has looked after the watch.

        Mutates: the pools.
        """
        unit = save.tokens // self._hash_tokens - 1
        for index, block in save.blocks:
            # Another sequence with the same beginning may have been faster.
            if self._pools[index].find(sequence.hashes[unit]) is None:
                self._publish_unit(index, block, unit, sequence, token_ids)
            self._pools[index].free([block])

    def _publish_unit(
        self, index: int, block: BlockId, unit: int, sequence: SequenceKv, token_ids: Sequence[int]
    ) -> None:
        hashes = sequence.hashes
        if not self._record_events:
            self._pools[index].publish(block, hashes[unit], hashes[0])
            return
        parent = hashes[unit - 1] if unit else None
        start = unit * self._hash_tokens
        self._pools[index].publish(
            block,
            hashes[unit],
            hashes[0],
            parent_hash=parent,
            token_ids=token_ids[start : start + self._hash_tokens],
            extras=unit_extras(sequence.extras, unit, self._hash_tokens),
        )

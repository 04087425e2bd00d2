"""Turning a hit into the tables of a sequence: pin it in all groups, then take fresh blocks, then say what to copy.

Must not search: the hit is given, and nothing may have been allocated since it was found.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import InvariantError, invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.groups import CacheGroup, RecurrentGroup
from headrace.kv.memory import KvMemory
from headrace.kv.sequence import Hit, SequenceKv
from headrace.types.plans import BlockCopy

Part = tuple[list[BlockId], BlockId | None]
"""Table and tail of one group, ready to be pinned."""


class HitTables:
    """Tables for the groups of one layout."""

    def __init__(self, groups: Sequence[CacheGroup], memory: KvMemory, *, hash_tokens: int) -> None:
        """Make the builder of tables.

        Args:
            groups: all groups, in order.
            memory: where their blocks lie.
            hash_tokens: tokens under one prefix hash.
        """
        self._groups = groups
        self._memory = memory
        self._hash_tokens = hash_tokens
        self._states = [isinstance(group, RecurrentGroup) for group in groups]

    def parts_at(self, hit: Hit, end_tokens: int) -> list[Part]:
        """Return what each group needs of a hit for a sequence that goes on at ``end_tokens``, not before.

        Args:
            hit: not changed.
            end_tokens: the hit's end, or behind it the end of what is loaded from outside. Then the recurrent states
                are loaded too, and windows need only what lies before that end.

        Raises:
            InvariantError: a group has another length than the hit, or a load would go on inside a copied block.
        """
        external = end_tokens > hit.tokens
        parts: list[Part] = []
        for group, part, is_state in zip(self._groups, hit.parts, self._states, strict=True):
            if is_state and external:
                parts.append(([], None))
                continue
            if part.tokens != hit.tokens or (external and part.tail is not None):
                raise InvariantError(
                    f"group {group.layout.group} has {part.tokens} tokens of a hit of {hit.tokens} and the tail "
                    f"{part.tail}, to go on at {end_tokens}"
                )
            table = list(part.table)
            if external and not group.keeps_all:
                behind = min(len(table), group.skippable(end_tokens) // group.block_tokens)
                table[:behind] = [NULL_BLOCK] * behind
            parts.append((table, part.tail))
        return parts

    def place(self, sequence: SequenceKv, hit: Hit, tokens: int, external_tokens: int) -> list[BlockCopy]:
        """Give a sequence its tables.

        Two phases: the hits of **all** groups are pinned, those to be copied too, before any block is handed out.
        Otherwise the allocation of one group could evict a hit that is not pinned yet.

        Args:
            sequence: holds no block.
            hit: of a look-up.
            tokens: for which there is room afterwards.
            external_tokens: what is loaded behind the hit.

        Returns:
            The copies, in order.

        Mutates: ``sequence.tables``, ``sequence.first_blocks``, the pools.
        """
        end_tokens = hit.tokens + external_tokens
        parts = self.parts_at(hit, end_tokens)
        for group, (table, tail) in zip(self._groups, parts, strict=True):
            group.pool.touch(table if tail is None else [*table, tail])
        for index, (group, (table, _)) in enumerate(zip(self._groups, parts, strict=True)):
            first_block = group.skippable(end_tokens) // group.block_tokens if group.block_tokens else 0
            table.extend([NULL_BLOCK] * (first_block - len(table)))
            sequence.tables[index] = table
            sequence.first_blocks[index] = first_block
        return self._complete(sequence, [tail for _, tail in parts], hit.tokens, tokens)

    def _complete(
        self, sequence: SequenceKv, tails: Sequence[BlockId | None], hit_tokens: int, tokens: int
    ) -> list[BlockCopy]:
        missing = [
            group.blocks_needed(len(table), tokens, sequence.encoder_tokens)
            for group, table in zip(self._groups, sequence.tables, strict=True)
        ]
        copied = {index: tail for index, tail in enumerate(tails) if tail is not None}
        for index in [index for index, tail in copied.items() if self._ends_with(index, tail, sequence, hit_tokens)]:
            sequence.tables[index].append(copied.pop(index))
            missing[index] -= 1
        if not self._memory.reserve(missing):
            for index in [i for i, tail in copied.items() if self._memory.pools[i].references(tail) == 1]:
                tail = copied.pop(index)
                self._make_writable(index, tail, sequence, hit_tokens)
                sequence.tables[index].append(tail)
                missing[index] -= 1
            invariant(self._memory.reserve(missing), f"a sequence is started, but {missing} blocks are not free")
        copies: list[BlockCopy] = []
        for index, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            fresh = group.allocate(table, missing[index]) if missing[index] else []
            if index in copied:
                copies.append(BlockCopy(index, copied[index], fresh[0]))
        for index, tail in copied.items():
            self._memory.pools[index].free([tail])
        return copies

    def _ends_with(self, index: int, tail: BlockId, sequence: SequenceKv, tokens: int) -> bool:
        """Return whether a pinned block has no other owner and nothing published behind ``tokens``."""
        pool = self._memory.pools[index]
        if self._states[index] or pool.references(tail) != 1:
            return False
        return pool.hashes_of(tail)[-1] == sequence.hashes[tokens // self._hash_tokens - 1]

    def _make_writable(self, index: int, tail: BlockId, sequence: SequenceKv, tokens: int) -> None:
        """Give up what is published in a block behind ``tokens``; of a state everything."""
        pool, size_tokens = self._memory.pools[index], self._groups[index].block_tokens
        kept: set[bytes] = set()
        if not self._states[index]:
            first = tokens // size_tokens * size_tokens // self._hash_tokens
            kept.update(sequence.hashes[first : tokens // self._hash_tokens])
        # In order of position; a block that began as a copy lacks the hashes of what was copied.
        pool.retract(tail, sum(1 for block_hash in pool.hashes_of(tail) if block_hash in kept))

"""Checkpoints of recurrent states: where to make them, and their life from plan to publication.

A working state is overwritten by every token, so only a copy made at exactly a boundary can be hit. The copy runs
after the step whose row ends there, and can be hit once that step's result is applied: never in the step that makes
it. Must not preempt or wait for a block: a checkpoint that finds no free block is not made.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.ids import BlockId
from headrace.kv.groups import NEVER_TOKENS, CacheGroup, RecurrentGroup
from headrace.kv.memory import KvMemory
from headrace.kv.sequence import PendingSave, SequenceKv
from headrace.types.plans import BlockCopy


class Checkpoints:
    """Checkpoints of all recurrent groups of one layout: each boundary has one in every such group, or in none."""

    def __init__(
        self, groups: Sequence[CacheGroup], memory: KvMemory, *, hash_tokens: int, every_tokens: int, enabled: bool
    ) -> None:
        """Make the manager.

        Args:
            groups: all groups, in order.
            memory: where their blocks lie.
            hash_tokens: tokens under one prefix hash.
            every_tokens: distance of the regular boundaries, rounded up to hash units; 0 for none.
            enabled: without prefix caching nothing is saved.
        """
        self._memory = memory
        self._num_groups = len(groups)
        self._indices = [index for index, group in enumerate(groups) if isinstance(group, RecurrentGroup)]
        self._hash_tokens = hash_tokens
        self._every_tokens = -(-every_tokens // hash_tokens) * hash_tokens
        self._enabled = enabled and bool(self._indices)

    def next_boundary(self, sequence: SequenceKv, after_tokens: int) -> int:
        """Return the first boundary behind ``after_tokens`` at which a state is worth keeping, or `NEVER_TOKENS`.

        Those are the last end of a hash unit inside the prompt that leaves a token to compute, the end of what the
        sequence shares with an earlier one, and every so many tokens.
        """
        if not self._enabled or not sequence.cacheable:
            return NEVER_TOKENS
        prompt_tokens = (sequence.prompt_tokens - 1) // self._hash_tokens * self._hash_tokens
        boundary = NEVER_TOKENS
        for tokens in (prompt_tokens, sequence.shared_boundary_tokens):
            if after_tokens < tokens < boundary:
                boundary = tokens
        if self._every_tokens:
            boundary = min(boundary, (after_tokens // self._every_tokens + 1) * self._every_tokens)
        return boundary

    def plan(self, sequence: SequenceKv, end_tokens: int) -> list[BlockCopy]:
        """Take checkpoint blocks for a row that ends at a boundary.

        Args:
            sequence: a running one.
            end_tokens: where its row ends.

        Returns:
            The copies to make after the step; none if the row ends elsewhere, the state is cached already, or no
            block is free.

        Mutates: ``sequence``, the pools.
        """
        is_boundary = sequence.save_at_tokens == end_tokens
        sequence.save_at_tokens = self.next_boundary(sequence, end_tokens)
        if not is_boundary or self._is_cached(sequence, end_tokens):
            return []
        if not self._memory.reserve([int(index in self._indices) for index in range(self._num_groups)]):
            return []
        copies: list[BlockCopy] = []
        blocks: list[tuple[int, BlockId]] = []
        for index in self._indices:
            checkpoint = self._memory.pools[index].allocate(1)[0]
            blocks.append((index, checkpoint))
            copies.append(BlockCopy(index, sequence.tables[index][0], checkpoint))
        sequence.saves.append(PendingSave(end_tokens, blocks))
        return copies

    def take_done(self, sequence: SequenceKv, computed_tokens: int) -> list[PendingSave]:
        """Return the saves up to ``computed_tokens``, whose steps are applied; the caller publishes and frees them.

        Mutates: ``sequence``.
        """
        done = 0
        while done < len(sequence.saves) and sequence.saves[done].tokens <= computed_tokens:
            done += 1
        taken, sequence.saves = sequence.saves[:done], sequence.saves[done:]
        return taken

    def drop(self, sequence: SequenceKv) -> None:
        """Free all pending checkpoints unpublished: nobody will say that their steps went well.

        Mutates: ``sequence``, the pools.
        """
        for save in sequence.saves:
            self._free(save)
        sequence.saves = []

    def _free(self, save: PendingSave) -> None:
        for index, block in save.blocks:
            self._memory.pools[index].free([block])

    def _is_cached(self, sequence: SequenceKv, tokens: int) -> bool:
        unit = tokens // self._hash_tokens - 1
        if unit >= len(sequence.hashes):
            return False
        block_hash = sequence.hashes[unit]
        return all(self._memory.pools[index].find(block_hash) is not None for index in self._indices)

"""The only owner of block tables: finds hits over all groups, lets sequences grow, publishes, and frees.

Every operation is all or nothing over the groups. Must not know requests' states, budgets or policies.

Plans are executed strictly in the order in which they are made, and this module counts on it: a block that is freed
here may be handed out again at once, although a plan in flight still touches it; a block that is to be copied need not
be held until the copy has run. Only what an **applied** step has computed is published or counted for freeing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headrace.base.errors import ConfigError, InvariantError, invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.budget import group_need_blocks
from headrace.kv.checkpoints import Checkpoints
from headrace.kv.events import BlockStored, KvEvent, parents_first
from headrace.kv.groups import NEVER_TOKENS, CacheGroup, GroupHit, RecurrentGroup, TokenGroup, make_group
from headrace.kv.lookup import PrefixLookup
from headrace.kv.memory import KvMemory
from headrace.kv.prefix_hash import NO_EXTRAS, HashExtras, root_of
from headrace.kv.publication import Publication
from headrace.kv.sequence import Hit, SequenceKv
from headrace.kv.tables import HitTables
from headrace.types.cache_specs import KvLayout
from headrace.types.plans import BlockCopy

__all__ = ["Hit", "KvCoordinator", "SequenceKv"]

_STATE_HASH_TOKENS = 16
"""Hash unit of a model that has recurrent states alone, so that no block suggests one."""


class KvCoordinator:
    """Block tables of all sequences over all groups."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        enable_prefix_caching: bool,
        batch_tokens: int,
        steps_in_flight: int = 1,
        draft_tokens: int = 0,
        hash_tokens: int | None = None,
        checkpoint_tokens: int = 4096,
        hash_seed: str = "",
        eviction: str = "lru",
        record_events: bool = False,
    ) -> None:
        """Make empty pools.

        Args:
            layout: groups and their blocks.
            enable_prefix_caching: without it nothing is hashed, published or found.
            batch_tokens: most tokens of one sequence in one step.
            steps_in_flight: most plans whose results are not applied.
            draft_tokens: most drafts of one row: tokens that may be taken back.
            hash_tokens: tokens under one prefix hash; by default the greatest that divides all blocks.
            checkpoint_tokens: distance of regular checkpoints of recurrent states; 0 for none.
            hash_seed: start of the hash chain; processes with equal seeds share hashes.
            eviction: policy by which free blocks lose their content.
            record_events: record cache events for `take_events`.

        Raises:
            ConfigError: drafts beside a recurrent state, or a hash unit that divides not every block.
        """
        invariant(len(layout.groups) > 0, "a KV layout needs at least one group")
        sizes_tokens = [group.block_tokens for group in layout.groups if group.block_tokens]
        self.hash_tokens = hash_tokens or math.gcd(*sizes_tokens) or _STATE_HASH_TOKENS
        if any(size % self.hash_tokens for size in sizes_tokens):
            raise ConfigError(
                f"--prefix-hash-tokens {self.hash_tokens} does not divide every block ({sizes_tokens} tokens): "
                f"use a divisor of {math.gcd(*sizes_tokens)}",
                param="prefix_hash_tokens",
            )
        self._caching = enable_prefix_caching
        self._record_events = record_events
        self._batch_tokens = batch_tokens
        self._steps_in_flight = steps_in_flight
        self.memory = KvMemory(layout, eviction=eviction, record_events=record_events)
        self.groups: list[CacheGroup] = [
            make_group(group, pool, hash_tokens=self.hash_tokens)
            for group, pool in zip(layout.groups, self.memory.pools, strict=True)
        ]
        if draft_tokens and any(isinstance(group, RecurrentGroup) for group in self.groups):
            raise ConfigError(
                "speculative drafts need a cache that can be rolled back, and a recurrent state cannot: turn them off",
                param="draft_tokens",
            )
        self._lookup = PrefixLookup(self.groups)
        self._hit_tables = HitTables(self.groups, self.memory, hash_tokens=self.hash_tokens)
        self._publication = Publication(
            self.groups,
            self.memory,
            hash_tokens=self.hash_tokens,
            root=root_of(hash_seed),
            record_events=record_events,
        )
        self._checkpoints = Checkpoints(
            self.groups,
            self.memory,
            hash_tokens=self.hash_tokens,
            every_tokens=checkpoint_tokens,
            enabled=enable_prefix_caching,
        )
        self._freeing = [index for index, group in enumerate(self.groups) if not group.keeps_all]
        self._sized = [
            (index, group.block_tokens) for index, group in enumerate(self.groups) if isinstance(group, TokenGroup)
        ]

    def new_sequence(
        self,
        *,
        extras: HashExtras = NO_EXTRAS,
        hashes: Sequence[bytes] = (),
        prompt_tokens: int,
        encoder_tokens: int = 0,
    ) -> SequenceKv:
        """Return the KV of a sequence that holds no block yet.

        Args:
            extras: what its KV depends on beside the token ids. With an encoder they must name its input (a media
                span of no tokens); otherwise the sequence is neither published nor hit.
            hashes: prefix hashes that the front end computed, one a hash unit.
            prompt_tokens: length of its prompt.
            encoder_tokens: length of its encoder output.
        """
        named = any(not span.tokens for span in extras.media)
        return SequenceKv(
            len(self.groups),
            extras=extras,
            hashes=hashes,
            prompt_tokens=prompt_tokens,
            encoder_tokens=encoder_tokens,
            cacheable=self._caching and (named or not encoder_tokens),
        )

    def find_hit(self, sequence: SequenceKv, token_ids: Sequence[int]) -> Hit:
        """Find the longest cached beginning that all groups share.

        At least one token is left to compute, because logits come from computing.

        Args:
            sequence: its hashes are extended to all complete units of ``token_ids``.
            token_ids: all known tokens, at least one.

        Returns:
            The hit, maybe of no tokens.

        Mutates: ``sequence``: hashes, and where a checkpoint is worth making.
        """
        if not sequence.cacheable:
            return self.no_hit()
        hit = self._lookup.longest(sequence.hashes, self._searchable(sequence, token_ids))
        sequence.shared_boundary_tokens = hit.shared_boundary_tokens
        return hit

    def group_hits(self, sequence: SequenceKv, token_ids: Sequence[int]) -> list[GroupHit]:
        """Return the longest hit of every group by itself, for those who can load what is missing in some.

        Args:
            sequence: its hashes are extended to all complete units of ``token_ids``.
            token_ids: all known tokens, at least one.

        Mutates: ``sequence.hashes``.
        """
        if not sequence.cacheable:
            return self.no_hit().parts
        return self._lookup.of_each(sequence.hashes, self._searchable(sequence, token_ids))

    def no_hit(self) -> Hit:
        """Return the hit of no tokens."""
        return self._lookup.none()

    def demand_blocks(self, hit: Hit, tokens: int, sequence: SequenceKv, *, external_tokens: int = 0) -> list[int]:
        """Return per group how many free blocks it takes to bring a sequence to ``tokens`` tokens.

        Groups that free what falls behind never hold the whole; they need their window and a batch.

        Args:
            hit: its cached beginning. Hit blocks that lie on the free list count: pinning takes them off.
            tokens: length of the sequence.
            sequence: one that holds no block.
            external_tokens: what will be loaded behind the hit.
        """
        demand: list[int] = []
        for index, (table, _) in enumerate(self._hit_tables.parts_at(hit, hit.tokens + external_tokens)):
            group = self.groups[index]
            held = len(table) - table.count(NULL_BLOCK)
            demand.append(self._lacking(group, len(table), held, tokens, sequence) + group.pool.idle(table))
        return demand

    def has_free(self, demand_blocks: Sequence[int], kept_blocks: Sequence[int] = (), hit: Hit | None = None) -> bool:
        """Return whether all groups together can have so many free blocks.

        Args:
            demand_blocks: per group, blocks to be taken.
            kept_blocks: per group, free blocks that must be left over; empty for none.
            hit: what will be pinned first. The extents in which it lies cannot change hands, so without it the answer
                may be too good, and `start` fails.
        """
        pinned: list[list[BlockId]] = []
        if hit is not None and len(self.groups) > 1:
            pinned = [part.table if part.tail is None else [*part.table, part.tail] for part in hit.parts]
        return self.memory.can_take(demand_blocks, kept_blocks, pinned)

    def watch(self, hashes: Sequence[bytes]) -> None:
        """Note from now on in `watched_published` whether something with one of these hashes is published.

        Until then no sequence with these hashes finds a longer hit, or one with more blocks in use, unless another
        one that shares them is started.

        Mutates: the watch; there is one.
        """
        self._publication.watch(hashes)

    @property
    def watched_published(self) -> bool:
        """True if something watched has been published since `watch`."""
        return self._publication.watched_published

    def start(self, sequence: SequenceKv, hit: Hit, tokens: int, *, external_tokens: int = 0) -> list[BlockCopy]:
        """Give a sequence its hit and room for ``tokens`` tokens in all.

        A hit that ends inside a block is continued in a copy. The block itself is taken over, without a copy, if
        nobody uses it and nothing in it lies behind the hit; or if no other block is left: then what lies behind is
        lost.

        Args:
            sequence: holds no block.
            hit: of `find_hit`, or with external tokens one whose recurrent parts are behind.
            tokens: at least the end of hit and external tokens.
            external_tokens: what is being loaded behind the hit: it is published by `external_done`. The recurrent
                state then arrives too, so its checkpoint is not copied.

        Returns:
            Copies for the plan that starts the sequence, in order.

        Mutates: ``sequence``, the pools.
        Requires: its demand was free (`has_free` with this hit) and nothing was allocated since.
        """
        invariant(not any(sequence.tables), "a sequence that holds blocks cannot be started")
        if sequence.alone:
            # Others may have run and cached something since `restart_alone`.
            self.forget_idle()
        copies = self._hit_tables.place(sequence, hit, tokens, external_tokens)
        end_tokens = hit.tokens + external_tokens
        sequence.published_units = hit.tokens // self.hash_tokens
        sequence.shared_boundary_tokens = hit.shared_boundary_tokens
        sequence.arriving_tokens = end_tokens if external_tokens else 0
        sequence.save_at_tokens = self._checkpoints.next_boundary(sequence, end_tokens)
        self._measure_room(sequence)
        self._set_next_advance(sequence)
        return copies

    def external_done(self, sequence: SequenceKv, token_ids: Sequence[int], valid_tokens: int) -> None:
        """Publish what has arrived from outside.

        If that is not all, the sequence cannot go on from it: windows and the state before another end are missing.
        Release it; a look-up then finds what is usable.

        Args:
            sequence: started with external tokens.
            token_ids: its known tokens.
            valid_tokens: everything before this position is right.

        Mutates: ``sequence``, the pools.
        """
        invariant(
            sequence.arriving_tokens > 0 and valid_tokens <= sequence.arriving_tokens,
            f"{valid_tokens} tokens have arrived of {sequence.arriving_tokens}",
        )
        sequence.arriving_tokens = 0
        if sequence.cacheable:
            self._publication.publish(sequence, token_ids, valid_tokens)
        self._set_next_advance(sequence)

    def grow(self, sequence: SequenceKv, tokens: int) -> list[list[BlockId]] | None:
        """Make room for ``tokens`` tokens in all.

        Returns:
            The new blocks per group, or None if they cannot be had; then nothing has changed.

        Mutates: ``sequence``, the pools.
        """
        groups, tables = self.groups, sequence.tables
        if len(groups) == 1:
            # The common case, some times in every step.
            group, table = groups[0], tables[0]
            count_blocks = group.blocks_needed(len(table), tokens, sequence.encoder_tokens)
            if count_blocks > group.pool.free_blocks:
                return None
            blocks = group.allocate(table, count_blocks) if count_blocks else []
            self._measure_room(sequence)
            return [blocks]
        missing = [
            group.blocks_needed(len(table), tokens, sequence.encoder_tokens)
            for group, table in zip(groups, tables, strict=True)
        ]
        if not self.memory.reserve(missing):
            return None
        added = [
            group.allocate(table, count_blocks) if count_blocks else []
            for group, table, count_blocks in zip(groups, tables, missing, strict=True)
        ]
        self._measure_room(sequence)
        return added

    def missing_blocks(self, sequence: SequenceKv, tokens: int) -> list[int]:
        """Return per group how many blocks more the sequence will hold at most on its way to ``tokens`` tokens."""
        missing: list[int] = []
        for index, group in enumerate(self.groups):
            places = len(sequence.tables[index])
            held = places - min(places, sequence.first_blocks[index])
            missing.append(self._lacking(group, places, held, tokens, sequence))
        return missing

    def next_stop(self, sequence: SequenceKv, start_tokens: int, end_tokens: int) -> int:
        """Return where a row should end that starts at ``start_tokens`` and could reach ``end_tokens``.

        That is the next boundary for a checkpoint, if there is one before ``end_tokens``.

        Args:
            sequence: a running one, or one about to start from the hit just found for it.
            start_tokens: first position of the row.
            end_tokens: greater than ``start_tokens``.
        """
        return min(end_tokens, self._checkpoints.next_boundary(sequence, start_tokens))

    def plan_saves(self, sequence: SequenceKv, end_tokens: int) -> list[BlockCopy]:
        """Plan the checkpoints of a row that ends at ``end_tokens``, after the row itself is planned.

        Needs no call before ``sequence.save_at_tokens``.

        Returns:
            Copies to make after the step's rows; maybe none. Published when the step is applied (`advance`).

        Mutates: ``sequence``, the pools.
        """
        return self._checkpoints.plan(sequence, end_tokens)

    def drop_saves(self, sequences: Iterable[SequenceKv]) -> bool:
        """Give up checkpoints whose steps are in flight, because their blocks are needed; return whether there are any.

        The copies may still run: plans are executed in order, so the next owner writes after them.

        Mutates: ``sequences``, the pools.
        """
        dropped = False
        for sequence in sequences:
            dropped |= bool(sequence.saves)
            self._checkpoints.drop(sequence)
        return dropped

    def advance(self, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        """Publish the hash units that have become complete, and free what no later token reads.

        Needs no call before ``sequence.advance_at_tokens``.

        Args:
            sequence: a running one.
            token_ids: its known tokens, at least ``computed_tokens`` of them.
            computed_tokens: tokens whose KV is on the device by a step whose result **has been applied**.

        Mutates: ``sequence``, the pools.
        """
        if sequence.arriving_tokens:
            raise InvariantError("a sequence whose beginning is still arriving has computed something")
        if sequence.cacheable:
            # Before anything is freed: what falls behind now can still be hit.
            self._publication.publish(sequence, token_ids, computed_tokens)
            if sequence.saves:
                for save in self._checkpoints.take_done(sequence, computed_tokens):
                    self._publication.publish_save(sequence, token_ids, save)
        for index in self._freeing:
            sequence.first_blocks[index] = self.groups[index].free_behind(
                sequence.tables[index], sequence.first_blocks[index], computed_tokens
            )
        self._set_next_advance(sequence)

    def release(self, sequence: SequenceKv) -> None:
        """Give back all blocks, tail first; what is published can still be hit. Pending checkpoints are dropped.

        Mutates: ``sequence``, the pools.
        """
        self._checkpoints.drop(sequence)
        for index, group in enumerate(self.groups):
            group.pool.free(sequence.tables[index])
            sequence.tables[index] = []
        sequence.published_units = sequence.shared_boundary_tokens = sequence.arriving_tokens = 0
        sequence.advance_at_tokens = sequence.save_at_tokens = NEVER_TOKENS
        sequence.covered_tokens = 0

    def restart_alone(self, sequence: SequenceKv) -> None:
        """Release a sequence that cannot grow although nobody else holds a block, so that it fits when it starts again.

        It is the extents that are short then: each holds some block in use, beside cached ones that nobody needs.
        Afterwards nothing is cached any more, and this sequence is not cached either, so that what falls behind its
        windows leaves whole extents free at once. Nobody else may be started while it runs (``sequence.alone``).

        Mutates: ``sequence``, the pools.
        Requires: no other sequence and no job holds a block.
        """
        self.release(sequence)
        sequence.cacheable, sequence.alone = False, True
        self.forget_idle()

    def forget(self, sequence: SequenceKv, others: Iterable[SequenceKv] = ()) -> None:
        """Make the whole content of a sequence unhittable, because it may be broken (non-finite values, say).

        With it goes all that was computed behind it, by whomever: everything that begins with the same unit. Those who
        hold such content go on, but nothing of theirs is cached any more.

        Args:
            sequence: whose row failed.
            others: all sequences that hold blocks.

        Mutates: ``sequence``, ``others``, the caches.
        """
        self._checkpoints.drop(sequence)
        if not sequence.hashes:
            return
        root_hash = sequence.hashes[0]
        for other in others:
            if other.hashes and other.hashes[0] == root_hash:
                self._checkpoints.drop(other)
                other.cacheable, other.save_at_tokens = False, NEVER_TOKENS
        for pool in self.memory.pools:
            pool.forget_from(root_hash)

    def forget_idle(self) -> None:
        """Make every block unhittable that no sequence uses.

        Mutates: the caches.
        """
        for pool in self.memory.pools:
            pool.forget_idle()

    def common_prefix(self, sequences: Sequence[SequenceKv]) -> list[int]:
        """Return per group how many leading blocks all these sequences share."""
        return [
            group.common_prefix([sequence.tables[index] for sequence in sequences])
            for index, group in enumerate(self.groups)
        ]

    def take_events(self) -> list[KvEvent]:
        """Return the cache events since the last call; in order within each group.

        Mutates: the record of events.
        """
        return [event for pool in self.memory.pools for event in pool.take_events()]

    def snapshot(self) -> list[BlockStored]:
        """Return everything that can be hit now, as events: parents before children, as far as they are there.

        Requires: ``record_events``; without, the tokens of a hash are not kept.
        """
        invariant(self._record_events, "a snapshot needs recorded events")
        return [event for pool in self.memory.pools for event in parents_first(pool.snapshot_events())]

    def _searchable(self, sequence: SequenceKv, token_ids: Sequence[int]) -> int:
        self._publication.extend(sequence, token_ids)
        return (len(token_ids) - 1) // self.hash_tokens * self.hash_tokens

    def _lacking(self, group: CacheGroup, places: int, held: int, tokens: int, sequence: SequenceKv) -> int:
        """Return how many blocks more a table will hold at most on its way to ``tokens`` tokens.

        Args:
            group: of the table.
            places: length of the table.
            held: places without the null block.
            tokens: length of the sequence.
            sequence: whose table it is.
        """
        blocks = group.blocks_needed(places, tokens, sequence.encoder_tokens)
        if blocks and not group.keeps_all:
            # What falls behind on the way is freed again.
            blocks = min(blocks, max(0, self._most_blocks(group, tokens, sequence) - held))
        return blocks

    def _most_blocks(self, group: CacheGroup, tokens: int, sequence: SequenceKv) -> int:
        return group_need_blocks(
            group.layout,
            tokens,
            batch_tokens=self._batch_tokens,
            in_flight=self._steps_in_flight,
            encoder_tokens=sequence.encoder_tokens,
        )

    def _measure_room(self, sequence: SequenceKv) -> None:
        covered_tokens = NEVER_TOKENS
        for index, block_tokens in self._sized:
            room_tokens = len(sequence.tables[index]) * block_tokens
            if room_tokens < covered_tokens:
                covered_tokens = room_tokens
        sequence.covered_tokens = covered_tokens

    def _set_next_advance(self, sequence: SequenceKv) -> None:
        next_tokens = (sequence.published_units + 1) * self.hash_tokens if sequence.cacheable else NEVER_TOKENS
        for index in self._freeing:
            next_tokens = min(next_tokens, self.groups[index].free_at(sequence.first_blocks[index]))
        sequence.advance_at_tokens = next_tokens

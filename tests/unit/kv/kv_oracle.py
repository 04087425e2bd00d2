"""A device that knows what should lie where, and a small scheduler that drives the coordinator over it.

Every cell of every block holds a number for the exact prefix that ends there. A row checks each cell that it reads
under the rule of its group's kind, so that a wrong hit, an early free or a missing copy is found by whoever reads it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from headrace.base.ids import BlockId
from headrace.kv.budget import fixed_layout
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.kv.prefix_hash import HashExtras
from headrace.kv.sequence import SequenceKv
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    IndexKeysSpec,
    KvLayout,
    LatentSpec,
    LayerCache,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.plans import BlockCopy

Spec = (
    FullAttentionSpec
    | SlidingWindowSpec
    | ChunkedLocalSpec
    | LatentSpec
    | CompressedSpec
    | IndexKeysSpec
    | RecurrentSpec
    | CrossAttentionSpec
)
VOCAB = 3
STATE = RecurrentSpec((StatePart("state", (4,), 4),))


def full(number: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(number, 4, 4, 2)


def sliding(window_tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(1, 4, 4, 2, window_tokens)


def chunked(chunk_tokens: int) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(1, 4, 4, 2, chunk_tokens)


def layout_of(*groups: tuple[Spec, int, int]) -> KvLayout:
    """Each group is (spec, tokens in a block, usable blocks): a memory in which all have theirs at once."""
    return fixed_layout(
        [LayerCache(index, spec, f"part{index}") for index, (spec, _, _) in enumerate(groups)],
        block_tokens=[block_tokens for _, block_tokens, _ in groups],
        usable_blocks=[usable for _, _, usable in groups],
    )


def next_content(content: int, token: int) -> int:
    return (content * 1_000_003 + token * 7919 + 12345) & (2**61 - 1)


@dataclass
class Row:
    sequence: Sequence
    start: int
    tokens: int
    sample: bool
    tables: list[list[int]]


@dataclass
class Plan:
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)
    loads: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    """(sequence, first position, end, valid end)"""


class Sequence:
    """One request: tokens that the device knows, and how far plans and results have come."""

    def __init__(self, number: int, prompt: list[int], salt: str | None, longest: int, encoder_tokens: int) -> None:
        self.number = number
        self.prompt_tokens = len(prompt)
        self.token_ids = list(prompt)  # of applied results
        self.device_ids = list(prompt)  # of executed plans
        self.salt = salt
        self.longest = longest
        self.encoder_tokens = encoder_tokens
        self.known = self.planned = self.computed = 0
        self.kv: SequenceKv
        self.epoch = 0
        self.running = False
        self.loading = False
        self.tried_load = False

    def content(self, tokens: int) -> int:
        content = hash(self.salt) & 0xFFFF
        for token in self.device_ids[:tokens]:
            content = next_content(content, token)
        return content


class Device:
    """Content of every block of every group: {(block, offset): number}; offset -1 is a state or an encoder part."""

    def __init__(self, layout: KvLayout) -> None:
        self.groups = layout.groups
        self.cells: list[dict[tuple[int, int], int]] = [{} for _ in layout.groups]

    def copy(self, copy: BlockCopy) -> None:
        cells = self.cells[copy.group]
        for key in [key for key in cells if key[0] == copy.target]:
            del cells[key]
        for (block, offset), content in list(cells.items()):
            if block == copy.source:
                cells[copy.target, offset] = content

    def run(self, plan: Plan) -> list[int]:
        for copy in plan.copies:
            self.copy(copy)
        for sequence, first, end, valid in plan.loads:
            self._load(sequence, first, end, valid)
        sampled = []
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            self._read(row)
            end = row.start + row.tokens
            if row.sample:
                token = row.sequence.content(end) % VOCAB
                if end == len(row.sequence.device_ids):
                    row.sequence.device_ids.append(token)
                assert row.sequence.device_ids[end] == token, "another sample than in an earlier life"
                sampled.append(token)
            else:
                sampled.append(-1)
        for copy in plan.saves:
            self.copy(copy)
        return sampled

    def _load(self, sequence: Sequence, first: int, end: int, valid: int) -> None:
        for index, group in enumerate(self.groups):
            table, cells = sequence.kv_tables[index], self.cells[index]
            spec = group.spec
            if isinstance(spec, CrossAttentionSpec):
                continue
            if isinstance(spec, RecurrentSpec):
                cells[table[0], -1] = sequence.content(end) if valid == end else -7
                continue
            for position in range(first, end):
                block = table[position // group.block_tokens]
                if block:
                    self._set(index, block, position, sequence.content(position + 1) if position < valid else -7)

    def _ratio(self, spec: Spec) -> int:
        return spec.ratio_tokens if isinstance(spec, CompressedSpec | IndexKeysSpec) else 1

    def _set(self, index: int, block: int, position: int, content: int) -> None:
        group, ratio = self.groups[index], self._ratio(self.groups[index].spec)
        if (position + 1) % ratio == 0:
            self.cells[index][block, position % group.block_tokens // ratio] = content

    def _write(self, row: Row) -> None:
        sequence, end = row.sequence, row.start + row.tokens
        for index, group in enumerate(self.groups):
            table, cells = row.tables[index], self.cells[index]
            if isinstance(group.spec, RecurrentSpec):
                assert len(table) == 1
                assert row.start == 0 or cells.get((table[0], -1)) == sequence.content(row.start), "a wrong state"
                cells[table[0], -1] = sequence.content(end)
            elif isinstance(group.spec, CrossAttentionSpec):
                assert len(table) == -(-sequence.encoder_tokens // group.block_tokens)
                for block in table:
                    if row.start == sequence.start_of_life:
                        cells[block, -1] = sequence.number
            else:
                for position in range(row.start, end):
                    block = table[position // group.block_tokens]
                    assert block, f"group {index}: nowhere to write position {position}"
                    self._set(index, block, position, sequence.content(position + 1))

    def _read(self, row: Row) -> None:
        for index, group in enumerate(self.groups):
            spec = group.spec
            if isinstance(spec, RecurrentSpec):
                continue
            if isinstance(spec, CrossAttentionSpec):
                for block in row.tables[index]:
                    assert self.cells[index][block, -1] == row.sequence.number
                continue
            read: set[int] = set()
            for position in range(row.start, row.start + row.tokens):
                first = 0
                if isinstance(spec, SlidingWindowSpec):
                    first = max(0, position - spec.window_tokens + 1)
                elif isinstance(spec, ChunkedLocalSpec):
                    first = position // spec.chunk_tokens * spec.chunk_tokens
                read.update(range(first, position + 1))
            ratio = self._ratio(spec)
            for position in read:
                if (position + 1) % ratio:
                    continue
                block = row.tables[index][position // group.block_tokens]
                found = self.cells[index].get((block, position % group.block_tokens // ratio))
                assert found == row.sequence.content(position + 1), (
                    f"group {index} {spec.__class__.__name__}: row {row.start}+{row.tokens} reads position {position} "
                    f"in block {block}: wrong content"
                )


class Run:
    """Random requests over random groups, with one or two plans in flight."""

    def __init__(self, rng: random.Random, layout: KvLayout, **options: object) -> None:
        self.rng = rng
        self.layout = layout
        self.batch_tokens = rng.choice([1, 3, 8, 20])
        self.in_flight = rng.choice([1, 2])
        self.kv = KvCoordinator(
            layout,
            enable_prefix_caching=True,
            batch_tokens=self.batch_tokens,
            steps_in_flight=self.in_flight,
            checkpoint_tokens=rng.choice([0, 4, 12]),
            record_events=True,
            **options,  # type: ignore[arg-type]
        )
        self.device = Device(layout)
        self.sequences: list[Sequence] = []
        self.plans: list[tuple[Plan, list[int]]] = []
        self.flights: list[tuple[Plan, dict[int, int]]] = []
        self.executed: list[list[int]] = []
        self.made = 0
        # What every hash stands for: the content of each position up to its end.
        self.contents: dict[bytes, list[int]] = {}
        self.replayed: list[set[bytes]] = [set() for _ in layout.groups]
        self.seen: Counter[str] = Counter()
        self.has_cross = any(isinstance(group.spec, CrossAttentionSpec) for group in layout.groups)
        self.external = rng.random() < 0.4
        stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 40))] for _ in range(2)]
        self.stems = [*stems, stems[0][: len(stems[0]) // 2] + [rng.randrange(VOCAB) for _ in range(20)]]
        self.longest = self._longest()

    def _longest(self) -> int:
        kv, tokens = self.kv, 1
        probe = kv.new_sequence(prompt_tokens=1, encoder_tokens=4 if self.has_cross else 0)
        while tokens < 60 and kv.has_free(kv.demand_blocks(kv.no_hit(), tokens + 1, probe)):
            tokens += 1
        return tokens

    def step(self) -> None:
        rng = self.rng
        action = rng.random()
        if action < 0.05:
            self.kv.forget_idle()
        elif action < 0.08 and self.sequences:
            victim = rng.choice(self.sequences)
            self.kv.forget(victim.kv)
            self.finish(victim)
        elif action < 0.12 and self.sequences:
            self.finish(rng.choice(self.sequences))
        if len(self.sequences) < 5 and rng.random() < 0.5:
            self.add()
        self._run_step()

    def drain(self) -> None:
        """Run what is there to its end."""
        for _ in range(2000):
            if not self.sequences:
                return
            self._run_step()
        raise AssertionError("requests that do not end")

    def _run_step(self) -> None:
        rng = self.rng
        self.flights.append(self.plan())
        while len(self.executed) < len(self.flights) and (rng.random() < 0.5 or len(self.flights) == self.in_flight):
            self.executed.append(self.device.run(self.flights[len(self.executed)][0]))
        while self.executed and (len(self.flights) == self.in_flight or rng.random() < 0.5):
            self.apply()
        self.check()

    def add(self) -> None:
        rng = self.rng
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5]))]
        prompt = prompt[: self.longest - 1] or [0]
        encoder_tokens = rng.randint(0, 4) if self.has_cross else 0
        longest = min(self.longest, len(prompt) + rng.randint(1, 12))
        sequence = Sequence(self.made, prompt, rng.choice([None, None, "a"]), longest, encoder_tokens)
        sequence.kv = self.kv.new_sequence(
            extras=HashExtras(salt=sequence.salt), prompt_tokens=len(prompt), encoder_tokens=encoder_tokens
        )
        sequence.known = len(prompt)
        self.made += 1
        self.sequences.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._remember([sequence])
        self.kv.release(sequence.kv)
        sequence.running = sequence.loading = False
        sequence.epoch += 1
        self.sequences.remove(sequence)

    def plan(self) -> tuple[Plan, dict[int, int]]:
        plan = Plan()
        planned: list[tuple[Sequence, int]] = []
        order = [sequence for sequence in self.sequences if sequence.running]
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        preempted = False
        for sequence in order:
            if not sequence.running or sequence.planned >= sequence.known or self.rng.random() < 0.1:
                continue
            if sequence.known >= sequence.longest and sequence.planned == sequence.known - 1:
                continue
            end = min(sequence.known, sequence.planned + self.rng.randint(1, self.batch_tokens))
            end = self.kv.next_stop(sequence.kv, sequence.planned, end)
            while (added := self.kv.grow(sequence.kv, end)) is None:
                candidates = [one for one in self.sequences if one.running]
                victim = candidates[-1]
                preempted = True
                self._preempt(victim, plan, planned)
                if victim is sequence:
                    if not self._is_busy():
                        assert not victim.kv.alone, "it does not fit into empty memory"
                        self.kv.restart_alone(victim.kv)
                        self.sequences.insert(0, self.sequences.pop())
                        self.seen["alone"] += 1
                    break
            if added is not None:
                self._row(sequence, end, plan, planned)
        if not preempted:
            self._admit(plan, planned)
        for row in plan.rows:
            if row.sequence.planned >= row.sequence.kv.save_at_tokens:
                saves = self.kv.plan_saves(row.sequence.kv, row.sequence.planned)
                self.seen["saves"] += len(saves)
                plan.saves.extend(saves)
            row.tables = [list(table) for table in row.sequence.kv.tables]
        return plan, {sequence.number: epoch for sequence, epoch in planned}

    def _row(self, sequence: Sequence, end: int, plan: Plan, planned: list[tuple[Sequence, int]]) -> None:
        start = sequence.planned
        sample = end == sequence.known
        plan.rows.append(Row(sequence, start, end - start, sample, []))
        sequence.planned = end
        sequence.known += sample
        planned.append((sequence, sequence.epoch))

    def _preempt(self, victim: Sequence, plan: Plan, planned: list[tuple[Sequence, int]]) -> None:
        self.seen["preempted"] += 1
        for row in [row for row in plan.rows if row.sequence is victim]:
            plan.rows.remove(row)
            planned.remove((victim, victim.epoch))
            victim.known -= row.sample
        self.kv.release(victim.kv)
        victim.running = False
        victim.epoch += 1
        victim.planned = victim.computed = 0
        self.sequences.remove(victim)
        self.sequences.append(victim)

    def _admit(self, plan: Plan, planned: list[tuple[Sequence, int]]) -> None:
        kv, loading = self.kv, any(sequence.loading for sequence in self.sequences)
        for sequence in list(self.sequences):
            if any(one.kv.alone and one.running for one in self.sequences):
                break
            if sequence.running or sequence.loading or sequence.known != len(sequence.token_ids):
                continue
            if any(sequence.kv.tables):  # came back from a load
                self._resume(sequence, plan, planned)
                continue
            hit = kv.find_hit(sequence.kv, sequence.token_ids)
            assert hit.tokens < len(sequence.token_ids)
            if self.external and not sequence.tried_load and not loading and self._load(sequence, plan):
                loading = True
                continue
            promised = self._promised()
            demand = kv.demand_blocks(hit, sequence.known, sequence.kv)
            if not kv.has_free(demand, promised, hit):
                if self._is_busy():
                    break
                # Its own hit may be in the way: it pins extents.
                hit = kv.no_hit()
                assert kv.has_free(kv.demand_blocks(hit, sequence.known, sequence.kv), promised), "it never starts"
            end = min(sequence.known, hit.tokens + self.rng.randint(1, self.batch_tokens))
            end = kv.next_stop(sequence.kv, hit.tokens, end)
            copies = kv.start(sequence.kv, hit, end)
            plan.copies.extend(copies)
            self._count(hit, copies)
            sequence.planned = sequence.computed = sequence.start_of_life = hit.tokens
            sequence.running = True
            self._row(sequence, end, plan, planned)

    def _count(self, hit: object, copies: list[BlockCopy]) -> None:
        self.seen["hits"] += hit.tokens > 0  # type: ignore[attr-defined]
        self.seen["copies"] += len(copies)
        self.seen["boundaries"] += hit.shared_boundary_tokens > 0  # type: ignore[attr-defined]

    def _is_busy(self) -> bool:
        """Return whether anybody holds blocks or will give some back."""
        return any(any(one.kv.tables) for one in self.sequences) or any(flight[0].rows for flight in self.flights)

    def _promised(self) -> list[int]:
        kept = [0] * len(self.kv.groups)
        for sequence in self.sequences:
            if any(sequence.kv.tables):
                for index, blocks in enumerate(self.kv.missing_blocks(sequence.kv, sequence.known)):
                    kept[index] += blocks
        return kept

    def _load(self, sequence: Sequence, plan: Plan) -> bool:
        kv = self.kv
        sequence.tried_load = True
        hit = kv.find_hit(sequence.kv, sequence.token_ids)
        unit = kv.hash_tokens
        most = (len(sequence.token_ids) - 1) // unit * unit - hit.tokens
        if most <= 0 or any(
            part.tail is not None for part, group in zip(hit.parts, kv.groups, strict=True) if group.block_tokens
        ):
            return False
        if hit.tokens and any(
            hit.tokens % group.block_tokens
            for group in kv.groups
            if group.block_tokens and group.reachable(0, 99, unit)
        ):
            return False
        external = self.rng.randint(1, most // unit) * unit
        demand = kv.demand_blocks(hit, sequence.known, sequence.kv, external_tokens=external)
        if not kv.has_free(demand, self._promised(), hit):
            return False
        end = hit.tokens + external
        assert kv.start(sequence.kv, hit, end, external_tokens=external) == []
        sequence.kv_tables = [list(table) for table in sequence.kv.tables]
        valid = self.rng.choice([end, end, hit.tokens + self.rng.randint(0, external // unit) * unit])
        plan.loads.append((sequence, hit.tokens, end, valid))
        sequence.loading, sequence.start_of_life = True, end
        sequence.load = (hit.tokens, end, valid, sequence.epoch)
        self.seen["loads"] += 1
        return True

    def _resume(self, sequence: Sequence, plan: Plan, planned: list[tuple[Sequence, int]]) -> None:
        start = sequence.computed
        end = min(sequence.known, start + self.rng.randint(1, self.batch_tokens))
        end = self.kv.next_stop(sequence.kv, start, end)
        if self.kv.grow(sequence.kv, end) is None:
            return
        sequence.running, sequence.planned = True, start
        self._row(sequence, end, plan, planned)

    def apply(self) -> None:
        plan, epochs = self.flights.pop(0)
        sampled = self.executed.pop(0)
        for sequence, _, end, valid in plan.loads:
            if not sequence.loading or sequence.load[3] != sequence.epoch:
                continue
            sequence.loading = False
            self.kv.external_done(sequence.kv, sequence.token_ids, valid)
            if valid == end:
                sequence.computed = sequence.planned = end
            else:
                self.kv.release(sequence.kv)
        for row, token in zip(plan.rows, sampled, strict=True):
            sequence = row.sequence
            if sequence not in self.sequences:
                continue
            if row.sample:
                sequence.token_ids.append(token)
            if epochs[sequence.number] == sequence.epoch:
                sequence.computed = row.start + row.tokens
                if sequence.computed >= sequence.kv.advance_at_tokens:
                    self.kv.advance(sequence.kv, sequence.token_ids, sequence.computed)
            if len(sequence.token_ids) >= sequence.longest:
                self.finish(sequence)

    def check(self) -> None:
        self._remember(self.sequences)
        self._check_references()
        self._check_events()
        self._check_published()

    def _remember(self, sequences: list[Sequence]) -> None:
        unit = self.kv.hash_tokens
        for sequence in sequences:
            for index, block_hash in enumerate(sequence.kv.hashes):
                if block_hash not in self.contents:
                    self.contents[block_hash] = [sequence.content(end) for end in range(1, (index + 1) * unit + 1)]

    def _check_references(self) -> None:
        for index, pool in enumerate(self.kv.memory.pools):
            owners: Counter[int] = Counter()
            for sequence in self.sequences:
                owners.update(block for block in sequence.kv.tables[index] if block)
                owners.update(block for save in sequence.kv.saves for group, block in save.blocks if group == index)
            used = 0
            for block in self._blocks(index):
                assert pool.references(block) == owners[block], f"group {index} block {block}"
                used += owners[block] > 0
            assert used + pool.free_blocks == pool.total_blocks

    def _blocks(self, index: int) -> list[BlockId]:
        """Ids of all blocks that the group has now."""
        layout, step = self.layout, self.layout.groups[index].block_granules
        per_extent = layout.extent_granules // step
        return [
            BlockId(layout.null_granules + extent * layout.extent_granules + place * step)
            for extent in self.kv.memory.extents_of(index)
            for place in range(per_extent)
        ]

    def _check_events(self) -> None:
        for event in self.kv.take_events():
            known = self.replayed[event.group]
            if isinstance(event, BlockStored):
                assert event.block_hash not in known
                known.add(event.block_hash)
                self.seen[event.kind] += 1
                assert len(event.token_ids) == event.block_tokens == self.kv.hash_tokens
                assert event.parent_hash is None or event.parent_hash in self.contents
            elif isinstance(event, BlockRemoved):
                known.remove(event.block_hash)
            else:
                assert isinstance(event, AllBlocksCleared)
                known.clear()
        snapshot: list[set[bytes]] = [set() for _ in self.layout.groups]
        for event in self.kv.snapshot():
            if event.parent_hash in self.replayed[event.group]:
                assert event.parent_hash in snapshot[event.group], "a child before its parent"
            snapshot[event.group].add(event.block_hash)
        for index, pool in enumerate(self.kv.memory.pools):
            assert self.replayed[index] == set(pool.cached_hashes()) == snapshot[index]

    def _check_published(self) -> None:
        """Every hash of every block stands for what lies there."""
        for index, (pool, group) in enumerate(zip(self.kv.memory.pools, self.layout.groups, strict=True)):
            cells = self.device.cells[index]
            for block in self._blocks(index):
                for block_hash in pool.hashes_of(block):
                    contents = self.contents[block_hash]
                    tokens = len(contents)
                    if isinstance(group.spec, RecurrentSpec):
                        assert cells.get((block, -1)) == contents[-1], "a wrong checkpoint"
                        continue
                    first = (tokens - 1) // group.block_tokens * group.block_tokens
                    if isinstance(group.spec, ChunkedLocalSpec):
                        first = max(first, (tokens - 1) // group.spec.chunk_tokens * group.spec.chunk_tokens)
                    if isinstance(group.spec, SlidingWindowSpec):
                        first = max(first, tokens - group.spec.window_tokens + 1)
                    ratio = self.device._ratio(group.spec)
                    for position in range(first, tokens):
                        if (position + 1) % ratio == 0:
                            found = cells.get((block, position % group.block_tokens // ratio))
                            assert found == contents[position], f"group {index} block {block} position {position}"

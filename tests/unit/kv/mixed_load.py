"""A load on the KV memory alone, in runs of blocks: sequences arrive, prefill in chunks, decode, end in any order.

It keeps what a scheduler would keep per sequence, tables by group, and asks the real memory and pools for blocks.
"""

import random
from dataclasses import dataclass, field

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.memory import KvMemory
from headrace.types.cache_specs import ChunkedLocalSpec, KvLayout, RecurrentSpec, SlidingWindowSpec

CHUNK_TOKENS = 8192
BURST_TOKENS = 256
"""Of a chunk, windows take only the end: most of it is a hit, or is written and freed before anything else happens."""


@dataclass(frozen=True)
class Phase:
    """What arrives: weights of short chats, medium prompts and long documents."""

    name: str
    chats: float
    medium: float
    documents: float


PHASES = [
    Phase("chats", 1.0, 0.0, 0.0),
    Phase("documents", 0.2, 0.2, 0.6),
    Phase("chats again", 0.97, 0.03, 0.0),
    Phase("medium", 0.2, 0.75, 0.05),
    Phase("chats at last", 1.0, 0.0, 0.0),
    Phase("everything", 0.6, 0.3, 0.1),
]


@dataclass(eq=False)
class Sequence:
    prompt_tokens: int
    tokens: int = 0
    tables: list[list[BlockId]] = field(default_factory=list)
    kept_from: list[int] = field(default_factory=list)


class MixedLoad:
    """Sequences over one memory; `shares` collects the live share of the budget at every refusal."""

    def __init__(self, layout: KvLayout, budget_bytes: int, seed: int) -> None:
        self.memory = KvMemory(layout)
        self.rng = random.Random(seed)
        self.budget_bytes = budget_bytes
        self.specs = [(group.spec, group.block_tokens) for group in layout.groups]
        self.running: list[Sequence] = []
        self.shares: list[tuple[float, str]] = []

    def run(self, rounds: int) -> None:
        """Fill the memory and let some sequences go, again and again; each phase ends with a large fall."""
        for phase in PHASES:
            for shares in [(0.05, 0.1, 0.3)] * (rounds - 1) + [(0.3, 0.6)]:
                self.fill(phase)
                self.fall(self.rng.choice(shares))

    def fill(self, phase: Phase) -> None:
        """Start sequences and let all grow until the memory has refused several times."""
        refusals = 0
        while refusals < 3:
            for _ in range(4):
                refusals += not self.advance(self.arrive(phase), phase.name)
            for sequence in self.rng.sample(self.running, min(4, len(self.running))):
                refusals += not self.advance(sequence, phase.name)

    def fall(self, share: float) -> None:
        """End some sequences in random order."""
        for sequence in self.rng.sample(self.running, int(len(self.running) * share)):
            self.running.remove(sequence)
            self.end(sequence)

    def arrive(self, phase: Phase) -> Sequence:
        kind = self.rng.choices(("chat", "medium", "document"), (phase.chats, phase.medium, phase.documents))[0]
        low, high = {"chat": (50, 1500), "medium": (1500, 12000), "document": (20000, 130000)}[kind]
        sequence = Sequence(self.rng.randint(low, high))
        sequence.tables = [[] for _ in self.specs]
        sequence.kept_from = [0] * len(self.specs)
        return sequence

    def advance(self, sequence: Sequence, label: str) -> bool:
        """Compute a chunk of the prompt, or some steps of decoding; False if the memory refused."""
        first = not sequence.tokens
        if sequence.tokens < sequence.prompt_tokens:
            target = min(sequence.prompt_tokens, sequence.tokens + CHUNK_TOKENS)
        else:
            target = sequence.tokens + self.rng.randint(1, 200)
        for place in range(len(self.specs)):
            self.skip(place, sequence, target)
        need = [self.missing(place, sequence, target) for place in range(len(self.specs))]
        if not self.memory.reserve(need):
            assert not self.memory.can_take(need)
            self.shares.append((self.memory.usage().live_bytes / self.budget_bytes, label))
            return False
        for place, (pool, count) in enumerate(zip(self.memory.pools, need, strict=True)):
            if count:
                table = sequence.tables[place]
                table += pool.allocate(count, table)
        sequence.tokens = target
        for place in range(len(self.specs)):
            self.free_behind(place, sequence)
        if first:
            self.running.append(sequence)
        return True

    def missing(self, place: int, sequence: Sequence, tokens: int) -> int:
        spec, block_tokens = self.specs[place]
        if isinstance(spec, RecurrentSpec):
            return 0 if sequence.tables[place] else 1
        return max(0, -(-tokens // block_tokens) - len(sequence.tables[place]))

    def skip(self, place: int, sequence: Sequence, tokens: int) -> None:
        """Leave the places of a window empty that lie far behind the end of a chunk."""
        spec, block_tokens = self.specs[place]
        if isinstance(spec, SlidingWindowSpec):
            table = sequence.tables[place]
            first = max(0, tokens - spec.window_tokens - BURST_TOKENS) // block_tokens
            table += [NULL_BLOCK] * max(0, first - len(table))

    def free_behind(self, place: int, sequence: Sequence) -> None:
        spec, block_tokens = self.specs[place]
        if isinstance(spec, SlidingWindowSpec):
            skip_tokens = max(0, sequence.tokens - spec.window_tokens + 1)
        elif isinstance(spec, ChunkedLocalSpec):
            skip_tokens = sequence.tokens // spec.chunk_tokens * spec.chunk_tokens
        else:
            return
        table, start, end = sequence.tables[place], sequence.kept_from[place], skip_tokens // block_tokens
        if end > start:
            self.memory.pools[place].free(table[start:end])
            table[start:end] = [NULL_BLOCK] * (end - start)
            sequence.kept_from[place] = end

    def end(self, sequence: Sequence) -> None:
        for pool, table in zip(self.memory.pools, sequence.tables, strict=True):
            pool.free(table)

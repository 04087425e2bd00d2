"""The exact backend: a token's bits depend on its position and its row's tokens, for every mask.

Not on chunks, rows beside it, a resumption elsewhere, a copied partial tail, nor on what freed blocks hold by now.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.attention.contract import RowBatch, Scoring
from headrace.attention.memory import BlockMemory, Finite
from headrace.attention.torch_exact import TorchExact
from headrace.types.cache_specs import ChunkedLocalSpec, FullAttentionSpec, GroupLayout, SlidingWindowSpec

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 16
TOKENS = 420
MASKS = {
    "full": FullAttentionSpec(KV_HEADS, DIM, DIM, 4),
    "window 5": SlidingWindowSpec(KV_HEADS, DIM, DIM, 4, 5),
    "window 100": SlidingWindowSpec(KV_HEADS, DIM, DIM, 4, 100),
    "window 300": SlidingWindowSpec(KV_HEADS, DIM, DIM, 4, 300),
    "chunk 48": ChunkedLocalSpec(KV_HEADS, DIM, DIM, 4, 48),
    "chunk 256": ChunkedLocalSpec(KV_HEADS, DIM, DIM, 4, 256),
}


class Content:
    """Queries, keys and values of a row, by position."""

    def __init__(self, seed: int, tokens: int = TOKENS) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [HEADS, KV_HEADS, KV_HEADS]
        self.qkv = torch.randn(tokens, sum(sizes), DIM, generator=generator).split(sizes, dim=1)


class Device:
    """A backend whose memory is garbage wherever nothing has been written, and NaN where something was freed."""

    def __init__(self, mask: str, scoring: Scoring, seed: int) -> None:
        group = GroupLayout(0, MASKS[mask], [0], BLOCK, 500, 1)
        generator = torch.Generator().manual_seed(seed)
        block_bytes = group.block_bytes()
        garbage = torch.randn(500 * block_bytes // 4, generator=generator)
        garbage[: block_bytes // 4] = 0
        self.memory = BlockMemory(group, garbage.view(torch.uint8), block_bytes, torch.float32, Finite(True))
        self.backend = TorchExact(self.memory)
        self.scoring = scoring
        self.free = (torch.randperm(499, generator=generator) + 1).tolist()
        self.tables: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}

    def step(self, rows: list[tuple[str, Content, int]]) -> dict[str, Tensor]:
        starts = [self.done.setdefault(name, 0) for name, _, _ in rows]
        counts = [count for _, _, count in rows]
        for (name, _, count), start in zip(rows, starts, strict=True):
            table = self.tables.setdefault(name, [])
            table += [self.free.pop() for _ in range(-(-(start + count) // BLOCK) - len(table))]
        parts = [
            torch.cat([content.qkv[i][s : s + n] for (_, content, n), s in zip(rows, starts, strict=True)])
            for i in range(3)
        ]
        prepared = self.backend.prepare(RowBatch.of(starts, counts, [self.tables[name] for name, _, _ in rows]))
        out = self.backend.forward(parts[0], parts[1], parts[2], 0, prepared, self.scoring)
        for name, _, count in rows:
            self.done[name] += count
            self.free_behind(name)
        return dict(zip([name for name, _, _ in rows], out.split(counts), strict=True))

    def needed_block(self, tokens: int) -> int:
        """The first block that the token after ``tokens`` needs."""
        return int(self.memory.reach.first(np.array([tokens]))[0]) // BLOCK

    def free_behind(self, name: str) -> None:
        """Spoil what no row needs any more; the tables of a worker go on naming it."""
        needed = {0}
        for other, table in self.tables.items():
            needed.update(table[self.needed_block(self.done[other]) :])
        for block in set(self.tables[name]) - needed:
            for view in self.memory.layer_views(0):
                view[block] = math.nan

    def hit(self, source: str, target: str, tokens: int) -> None:
        """Give another row a prefix: null behind its reach, whole blocks shared, and its partial tail copied."""
        first = self.needed_block(tokens)
        table = [0] * min(first, tokens // BLOCK) + self.tables[source][first : tokens // BLOCK]
        if tokens % BLOCK:
            table.append(self.free.pop())
            for view in self.memory.layer_views(0):
                view[table[-1]] = view[self.tables[source][tokens // BLOCK]]
        self.tables[target], self.done[target] = table, tokens


def alone(mask: str, scoring: Scoring, content: Content) -> Tensor:
    device = Device(mask, scoring, 1)
    return torch.cat([device.step([("a", content, 1)])["a"] for _ in range(TOKENS)])


SCORINGS = {
    "plain": Scoring(0.3),
    "capped": Scoring(0.3, 5.0),
    "sinks": Scoring(0.3, None, torch.linspace(-2, 2, HEADS)),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_bits_depend_on_position_and_content_only(mask: str, scoring: str, threads: int) -> None:
    torch.set_num_threads(threads)
    content, how = Content(3), SCORINGS[scoring]
    want = alone(mask, how, content)
    others = [(f"o{i}", Content(20 + i)) for i in range(5)]

    whole = Device(mask, how, 2).step([("a", content, TOKENS)])["a"]
    assert torch.equal(whole, want)

    chunked = Device(mask, how, 4)
    got = []
    for turn, size in enumerate((1, 47, 1, 15, 64, 127, 1, 2, 129, 33)):
        beside = [(name, other, (1, 30, 7)[(turn + i) % 3]) for i, (name, other) in enumerate(others)]
        got.append(chunked.step([*beside[: turn % 6], ("a", content, size), *beside[turn % 6 :]])["a"])
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [16, 90, 96, 256, 301])
def test_bits_after_a_prefix_hit(tokens: int, mask: str, scoring: str) -> None:
    content, how = Content(3), SCORINGS[scoring]
    want = Device(mask, how, 2).step([("a", content, TOKENS)])["a"]
    device = Device(mask, how, 6)
    device.step([("a", content, tokens)])
    device.hit("a", "b", tokens)
    # The owner goes on behind what was copied, with other tokens.
    device.step([("a", Content(9), 3)])
    got = [device.step([("b", content, size)])["b"] for size in (1, TOKENS - tokens - 2, 1)]
    assert torch.equal(torch.cat(got), want[tokens:])


@pytest.mark.parametrize("mask", MASKS)
def test_bits_after_preemption_and_resumption(mask: str) -> None:
    content, how = Content(3), SCORINGS["plain"]
    want = alone(mask, how, content)
    device = Device(mask, how, 7)
    device.step([("a", content, 200)])
    got = [device.step([("again", content, size)])["again"] for size in (130, 80, 1, 1, 100, 108)]
    assert torch.equal(torch.cat(got), want)

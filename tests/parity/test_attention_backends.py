"""Attention backends against the plain reference: every mask, on memory whose every unrelated byte is poison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from headrace.attention.contract import Reach, RowBatch, Scoring
from headrace.attention.memory import BlockMemory, Finite
from headrace.attention.select import load_backend
from headrace.attention.torch_sdpa import split_by_length
from headrace.base.errors import InvariantError, UnsupportedModelError
from headrace.ops.attention.reference import causal_attention
from headrace.types.cache_specs import CacheSpec, ChunkedLocalSpec, FullAttentionSpec, GroupLayout, SlidingWindowSpec

CPU = torch.device("cpu")
BACKENDS = ("torch_sdpa", "torch_exact")
# (start, tokens) of each row
BATCHES = {
    "one decode": [(0, 1)],
    "decodes": [(8, 1), (0, 1), (130, 1), (31, 1)],
    "decodes of one length": [(16, 1)] * 3,
    "whole prompts": [(0, 5), (0, 140)],
    "chunks": [(3, 7), (127, 2), (120, 70)],
    "mixed": [(40, 1), (0, 9), (64, 1), (5, 3), (300, 1), (128, 1), (127, 1)],
    "long": [(600, 530), (700, 1), (1023, 1)],
}
# Smaller and larger than blocks of 4, 5 and 16 tokens and than the exact backend's tile of 128; with their edges.
MASKS = {
    "full": Reach(),
    "window 1": Reach(window_tokens=1),
    "window 3": Reach(window_tokens=3),
    "window 16": Reach(window_tokens=16),
    "window 129": Reach(window_tokens=129),
    "window 5000": Reach(window_tokens=5000),
    "chunk 1": Reach(chunk_tokens=1),
    "chunk 8": Reach(chunk_tokens=8),
    "chunk 33": Reach(chunk_tokens=33),
    "chunk 128": Reach(chunk_tokens=128),
}
SHAPES = (((6, 2, 16), 4), ((3, 3, 10), 16), ((7, 1, 64), 5))


def spec_of(reach: Reach, kv_heads: int, dim: int, dtype_bytes: int) -> CacheSpec:
    if reach.window_tokens:
        return SlidingWindowSpec(kv_heads, dim, dim, dtype_bytes, reach.window_tokens)
    if reach.chunk_tokens:
        return ChunkedLocalSpec(kv_heads, dim, dim, dtype_bytes, reach.chunk_tokens)
    return FullAttentionSpec(kv_heads, dim, dim, dtype_bytes)


@dataclass
class Row:
    start: int
    tokens: int
    table: list[int]
    key: torch.Tensor
    value: torch.Tensor


class Scene:
    """A backend over one group's memory, of two layers; every byte but the null block's may be poison."""

    def __init__(
        self,
        backend: str,
        shape: tuple[int, int, int],
        block_tokens: int,
        dtype: torch.dtype = torch.float32,
        reach: Reach = Reach(),
        *,
        poisoned: bool = False,
        granule_bytes: int = 0,
        device: torch.device = CPU,
    ) -> None:
        _, kv_heads, dim = shape
        self.device = device
        self.shape, self.block_tokens, self.reach = shape, block_tokens, reach
        spec = spec_of(reach, kv_heads, dim, dtype.itemsize)
        block_bytes = 2 * spec.block_bytes(block_tokens)
        granule_bytes = granule_bytes or block_bytes
        self.granules = -(-block_bytes // granule_bytes)
        self.group = GroupLayout(0, spec, [4, 7], block_tokens, 1000, self.granules)
        self.arena = torch.zeros(1000 * self.granules * granule_bytes, dtype=torch.uint8, device=device)
        if poisoned:
            self.arena[self.granules * granule_bytes :] = 255  # all bits set: NaN in every type
        self.memory = BlockMemory(self.group, self.arena, granule_bytes, dtype, Finite(not poisoned))
        self.backend = load_backend(backend, self.memory)
        self.generator = torch.Generator().manual_seed(5)
        self.free = ((torch.randperm(999, generator=self.generator) + 1) * self.granules).tolist()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def row(self, start: int, tokens: int) -> Row:
        """A row with its history in the memory; what lies behind its reach is null, or a block of somebody else."""
        needed = int(self.reach.first(np.array([start]))[0]) // self.block_tokens
        count = -(-(start + tokens) // self.block_tokens)
        stale = [0 if place % 2 else self.free[0] for place in range(needed)]
        table = stale + [self.free.pop() for _ in range(count - needed)]
        key, value = (self.random(start + tokens, *self.shape[1:]) for _ in range(2))
        self.write(table, key, value, range(needed * self.block_tokens, start), self.memory)
        return Row(start, tokens, table, key, value)

    def write(self, table: list[int], key: Any, value: Any, positions: range, memory: BlockMemory) -> None:
        keys, values = memory.layer_views(1)
        for position in positions:
            block, offset = table[position // self.block_tokens], position % self.block_tokens
            keys[block, offset] = key[position].to(keys.dtype)
            values[block, offset] = value[position].to(keys.dtype)

    def attend(self, rows: list[Row], scoring: Scoring, *, own: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step of layer 7; return its output and the reference's, and check that only its slots changed."""
        heads, kv_heads, dim = self.shape
        q = [self.random(row.tokens, heads, dim) for row in rows]
        # As a model passes them: parts of one wider tensor.
        wide = torch.full((sum(row.tokens for row in rows), heads + 2 * kv_heads, dim), math.nan, device=self.device)
        wide[:, :heads] = torch.cat(q)
        wide[:, heads : heads + kv_heads] = torch.cat([row.key[row.start :] for row in rows])
        wide[:, heads + kv_heads :] = torch.cat([row.value[row.start :] for row in rows])
        after = self.arena.clone()
        copy = BlockMemory(
            self.group, after, self.memory._granule * self.memory.dtype.itemsize, self.memory.dtype, Finite(True)
        )
        for row in rows:
            self.write(row.table, row.key, row.value, range(row.start, row.start + row.tokens), copy)
        parts = wide.split([heads, kv_heads, kv_heads], dim=1)
        batch = RowBatch.of([row.start for row in rows], [row.tokens for row in rows], [row.table for row in rows])
        prepared = self.backend.prepare(batch)
        if own:
            out = self.backend.forward(*parts, 1, prepared, scoring)
        else:
            self.arena.copy_(after)
            out = self.backend.forward(parts[0], None, None, 1, prepared, scoring)
        assert torch.equal(self.arena, after)
        return out, torch.cat([self.reference(q[i], row, scoring) for i, row in enumerate(rows)])

    def reference(self, q: torch.Tensor, row: Row, scoring: Scoring) -> torch.Tensor:
        return causal_attention(
            q,
            row.key,
            row.value,
            scoring.scale,
            window_tokens=self.reach.window_tokens,
            chunk_tokens=self.reach.chunk_tokens,
            soft_cap=scoring.soft_cap,
            sinks=scoring.sinks,
        )


def check(
    scene: Scene, batch: list[tuple[int, int]], bound: float, scoring: Scoring | None = None, **how: bool
) -> None:
    out, want = scene.attend([scene.row(*row) for row in batch], scoring or Scoring(0.31), **how)
    assert out.shape == want.shape
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want, atol=bound, rtol=0)


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_reference(mask: str, backend: str, poisoned: bool) -> None:
    for batch in BATCHES.values():
        for shape, block_tokens in SHAPES if len(batch) < 3 or mask == "full" else SHAPES[:1]:
            check(Scene(backend, shape, block_tokens, reach=MASKS[mask], poisoned=poisoned), batch, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["full", "window 16", "chunk 33"])
@pytest.mark.parametrize("capped", [None, 2.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_cap_and_sinks(with_sinks: bool, capped: float | None, mask: str, backend: str) -> None:
    for name in ("decodes", "chunks", "mixed"):
        scene = Scene(backend, (6, 2, 16), 4, reach=MASKS[mask], poisoned=True)
        sinks = scene.random(6) * 2 if with_sinks else None
        check(scene, BATCHES[name], 2e-5, Scoring(1.7, capped, sinks))


@pytest.mark.parametrize("mask", MASKS)
def test_bfloat16_cache_under_float32_activations(mask: str) -> None:
    for batch in BATCHES.values():
        check(Scene("torch_sdpa", (6, 2, 16), 4, torch.bfloat16, MASKS[mask], poisoned=True), batch, 6e-2)
    capped = Scoring(0.31, 3.0)
    check(Scene("torch_sdpa", (6, 2, 16), 4, torch.bfloat16, MASKS[mask]), BATCHES["mixed"], 6e-2, capped)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granule_bytes", [64, 1000, 4096])
def test_granules_that_no_row_divides(granule_bytes: int, backend: str) -> None:
    """Blocks padded to granules, of which neither a token nor half a block is a multiple."""
    for mask in ("full", "window 16"):
        for shape, block_tokens in SHAPES:
            scene = Scene(backend, shape, block_tokens, reach=MASKS[mask], poisoned=True, granule_bytes=granule_bytes)
            check(scene, BATCHES["mixed"], 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["full", "window 16", "chunk 33"])
def test_a_layer_that_reads_what_another_wrote(mask: str, backend: str) -> None:
    for name in ("whole prompts", "mixed"):
        scene = Scene(backend, (6, 2, 16), 4, reach=MASKS[mask], poisoned=True)
        check(scene, BATCHES[name], 2e-5, own=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_gather_only_what_they_need(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = BlockMemory.gather
    monkeypatch.setattr(
        BlockMemory,
        "gather",
        lambda self, place, what: (read.append(int((what.rows >= 2 * self.layers).sum())), whole(self, place, what))[1],
    )
    # A decode at 3,000 with a window of 20 lies in 6 blocks of 4 at most; keys and values.
    scene = Scene(backend, (6, 2, 16), 4, reach=Reach(window_tokens=20))
    check(scene, [(3000, 1)], 2e-5)
    assert read == [2 * 6] or read == [2 * 5]
    read.clear()
    check(scene, [(640, 32)], 2e-5)
    assert 0 < sum(read) <= 2 * 2 * (5 + 9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_values_stay_in_their_row(backend: str) -> None:
    """A row that holds NaN must not hide it, nor give it to the row beside it."""
    for reach in (MASKS["full"], MASKS["window 16"]):
        scene = Scene(backend, (4, 2, 8), 4, reach=reach, poisoned=True)
        good, bad = scene.row(9, 1), scene.row(9, 1)
        bad.key[9] = bad.value[9] = math.nan
        out, want = scene.attend([good, bad], Scoring(1.0))
        torch.testing.assert_close(out[:1], want[:1], atol=1e-5, rtol=0)
        assert out[1].isnan().any()


def test_reach() -> None:
    positions = np.arange(40)
    for reach in MASKS.values():
        first = reach.first(positions)
        for position in positions.tolist():
            seen = list(range(position + 1))
            if reach.window_tokens:
                seen = [key for key in seen if position - key < reach.window_tokens]
            if reach.chunk_tokens:
                seen = [key for key in seen if key // reach.chunk_tokens == position // reach.chunk_tokens]
            assert first[position] == seen[0]
    with pytest.raises(InvariantError, match="window and chunks"):
        Reach(window_tokens=4, chunk_tokens=4)


def test_refusals() -> None:
    def memory(spec: CacheSpec, dtype: torch.dtype = torch.float32, granule_bytes: int = 64) -> BlockMemory:
        return BlockMemory(
            GroupLayout(0, spec, [0], 4, 10, 8),
            torch.zeros(64 * 80, dtype=torch.uint8),
            granule_bytes,
            dtype,
            Finite(True),
        )

    with pytest.raises(UnsupportedModelError, match="8 and values of 4"):
        memory(FullAttentionSpec(2, 8, 4, 4))
    equal = FullAttentionSpec(2, 8, 8, 4)
    with pytest.raises(InvariantError, match="under a spec of 4 B"):
        memory(equal, torch.bfloat16)
    with pytest.raises(InvariantError, match="granules of 66 B"):
        memory(equal, granule_bytes=66)
    with pytest.raises(InvariantError, match="float32"):
        load_backend("torch_exact", memory(FullAttentionSpec(2, 8, 8, 2), torch.bfloat16))
    for name in BACKENDS:
        backend = load_backend(name, memory(equal))
        with pytest.raises(InvariantError, match="end before token 4"):
            backend.prepare(RowBatch.of([4], [1], [[8]]))
        with pytest.raises(InvariantError, match="no block for token 4"):
            backend.prepare(RowBatch.of([0, 3], [1, 3], [[8, 16], [24, 0]]))


def test_buckets_bound_the_padding() -> None:
    lengths = np.array([1, 2000, 15, 900, 128, 1900, 40, 30000])
    blocks = -(-lengths // 16)
    buckets = split_by_length(blocks)
    assert sorted(row for bucket in buckets for row in bucket.tolist()) == list(range(len(lengths)))
    for bucket in buckets:
        assert blocks[bucket].max() <= max(8, int(blocks[bucket].min() * 1.5))
    assert [bucket.tolist() for bucket in split_by_length(np.array([9, 7, 8]))] == [[0, 1, 2]]
    assert split_by_length(np.array([], np.int64)) == []

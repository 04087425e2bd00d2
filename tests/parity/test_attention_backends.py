"""Attention backends against the plain reference, on memory whose every unrelated value is poison."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headrace.attention.contract import RowBatch
from headrace.attention.memory import BlockMemory
from headrace.attention.select import load_backend
from headrace.attention.torch_sdpa import split_by_length
from headrace.base.errors import InvariantError, UnsupportedModelError
from headrace.ops.attention.reference import causal_attention
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout

CPU = torch.device("cpu")
BACKENDS = ("torch_sdpa", "torch_exact")
# (start, tokens) of each row
BATCHES = {
    "one decode": [(0, 1)],
    "decodes": [(8, 1), (0, 1), (130, 1), (31, 1)],
    "decodes of one length": [(16, 1)] * 3,
    "whole prompts": [(0, 5), (0, 140)],
    "chunks": [(3, 7), (127, 2), (120, 70)],
    "mixed": [(40, 1), (0, 9), (64, 1), (5, 3), (300, 1)],
}


class Scene:
    """A backend with history in its cache and poison everywhere else."""

    def __init__(self, backend: str, shape: tuple[int, int, int], block_tokens: int, dtype: torch.dtype) -> None:
        _, kv_heads, dim = shape
        self.shape = shape
        spec = FullAttentionSpec(kv_heads, dim, dim, dtype.itemsize)
        self.block_tokens = block_tokens
        self.backend = load_backend(backend)
        self.kv = self.backend.allocate(GroupLayout(0, spec, [4, 7], block_tokens, 600), dtype, CPU)
        self.generator = torch.Generator().manual_seed(5)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def tables(self, rows: list[tuple[int, int]]) -> list[list[int]]:
        free = (torch.randperm(599, generator=self.generator) + 1).tolist()
        return [[free.pop() for _ in range(-(-(s + n) // self.block_tokens) + 1)] for s, n in rows]


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_reference(batch: str, backend: str, poisoned: bool) -> None:
    rows = BATCHES[batch]
    for shape, block_tokens in (((6, 2, 16), 4), ((3, 3, 10), 16), ((7, 1, 64), 5)):
        scene = Scene(backend, shape, block_tokens, torch.float32)
        run(scene, rows, poisoned, 2e-5)


def test_bfloat16_cache_under_float32_activations() -> None:
    for batch in BATCHES.values():
        run(Scene("torch_sdpa", (6, 2, 16), 4, torch.bfloat16), batch, False, 4e-2)


def run(scene: Scene, rows: list[tuple[int, int]], poisoned: bool, bound: float) -> None:
    heads, kv_heads, dim = scene.shape
    tables = scene.tables(rows)
    layer = scene.kv[7]
    if poisoned:
        layer.memory.fill_(math.nan)
        scene.backend.observe(torch.full((1, 4), math.nan))
    keys = [scene.random(s + n, kv_heads, dim) for s, n in rows]
    values = [scene.random(s + n, kv_heads, dim) for s, n in rows]
    for (start, _), table, key, value in zip(rows, tables, keys, values, strict=True):
        for position in range(start):
            block, offset = table[position // scene.block_tokens], position % scene.block_tokens
            layer.key[block, offset] = key[position].to(layer.key.dtype)
            layer.value[block, offset] = value[position].to(layer.key.dtype)
    before = layer.memory.clone()
    batch = RowBatch([s for s, _ in rows], [n for _, n in rows], tables)
    q = [scene.random(n, heads, dim) for _, n in rows]
    # As a model passes them: parts of one wider tensor.
    total = sum(n for _, n in rows)
    wide = torch.full((total, heads + 2 * kv_heads, dim), math.nan)
    wide[:, :heads] = torch.cat(q)
    wide[:, heads : heads + kv_heads] = torch.cat([k[s:] for k, (s, _) in zip(keys, rows, strict=True)])
    wide[:, heads + kv_heads :] = torch.cat([v[s:] for v, (s, _) in zip(values, rows, strict=True)])
    step = scene.backend.prepare(batch)
    assert (step.rows, step.longest_tokens) == (len(rows), max(s + n for s, n in rows))
    parts = wide.split([heads, kv_heads, kv_heads], dim=1)
    out = scene.backend.forward(*parts, layer, step, 0.31)
    want = torch.cat([causal_attention(q[r], keys[r], values[r], 0.31) for r in range(len(rows))])
    assert out.shape == want.shape
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want, atol=bound, rtol=0)
    check_only_own_slots_changed(scene, before, layer, rows, tables)


def check_only_own_slots_changed(scene: Scene, before: torch.Tensor, layer: Any, rows: Any, tables: Any) -> None:
    same = (layer.memory == before) | (layer.memory.isnan() & before.isnan())
    changed = ~same.all(-1).all(-1)  # [blocks, layers, 2, block_tokens]
    own = torch.zeros_like(changed)
    for (start, tokens), table in zip(rows, tables, strict=True):
        for position in range(start, start + tokens):
            own[table[position // scene.block_tokens], layer.place, :, position % scene.block_tokens] = True
    assert torch.equal(changed, own)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_values_stay_in_their_row(backend: str) -> None:
    """A block that once held NaN may serve another request; a row that holds NaN must not hide it."""
    scene = Scene(backend, (4, 2, 8), 4, torch.float32)
    layer = scene.kv[4]
    bad = torch.full((3, 2, 8), math.nan)
    step = scene.backend.prepare(RowBatch([0], [3], [[1]]))
    out = scene.backend.forward(scene.random(3, 4, 8), bad, bad, layer, step, 1.0)
    assert out.isnan().any()
    scene.backend.observe(out)
    # Block 1 now belongs to a row of two tokens; beside it runs a row that really holds NaN.
    layer.key[2, 0], layer.value[2, 0] = math.nan, math.nan
    key, value = scene.random(2, 2, 8), scene.random(2, 2, 8)
    layer.key[1, 0], layer.value[1, 0] = key[0], value[0]
    step = scene.backend.prepare(RowBatch([1, 1], [1, 1], [[1], [2]]))
    q = scene.random(2, 4, 8)
    out = scene.backend.forward(q, key[1].repeat(2, 1, 1), value[1].repeat(2, 1, 1), layer, step, 1.0)
    torch.testing.assert_close(out[:1], causal_attention(q[:1], key, value, 1.0), atol=1e-5, rtol=0)
    assert out[1].isnan().any()


def test_a_block_holds_all_layers_contiguously() -> None:
    spec = FullAttentionSpec(2, 8, 8, 4)
    group = GroupLayout(0, spec, [0, 1, 5], 4, 10)
    memory = BlockMemory(group, torch.float32, CPU)
    assert memory.memory[3].is_contiguous()
    assert memory.memory[3].nbytes == group.block_bytes()
    assert not memory.memory.any(), "zeroed"
    views = memory.layer_kv()
    assert sorted(views) == [0, 1, 5]
    assert views[5].key.shape == (10, 4, 2, 8)
    views[5].value[3, 1, 0, 2] = 7
    assert memory.memory[3, 2, 1, 1, 0, 2] == 7


def test_refusals() -> None:
    spec = FullAttentionSpec(2, 8, 4, 4)
    with pytest.raises(UnsupportedModelError, match="8 and values of 4"):
        BlockMemory(GroupLayout(0, spec, [0], 4, 10), torch.float32, CPU)
    backend = load_backend("torch_exact")
    with pytest.raises(InvariantError, match="not allocated"):
        backend.prepare(RowBatch([0], [1], [[1]]))
    equal = FullAttentionSpec(2, 8, 8, 2)
    with pytest.raises(InvariantError, match="float32"):
        backend.allocate(GroupLayout(0, equal, [0], 4, 10), torch.bfloat16, CPU)
    backend.allocate(GroupLayout(0, equal, [0], 4, 10), torch.float32, CPU)
    with pytest.raises(InvariantError, match="ends before token 4"):
        backend.prepare(RowBatch([4], [1], [[1]]))


def test_buckets_bound_the_padding() -> None:
    lengths = [1, 2000, 15, 900, 128, 1900, 40, 30000]
    buckets = split_by_length(list(range(len(lengths))), lengths, 16)
    assert sorted(row for bucket in buckets for row in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        blocks = [-(-lengths[row] // 16) for row in bucket]
        assert max(blocks) <= max(8, int(min(blocks) * 1.5))
    assert split_by_length([2, 0, 1], [100, 110, 120], 16) == [[2, 0, 1]]
    assert split_by_length([], lengths, 16) == []

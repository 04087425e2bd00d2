"""The arena: several groups of different kinds in one row of granules; copies, states, shared layers, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.attention.arena import KvArena, LayerAttention
from headrace.attention.contract import RowBatch, Scoring
from headrace.attention.step import StepContext
from headrace.base.errors import InvariantError, UnsupportedModelError
from headrace.ops.attention.reference import causal_attention
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GroupLayout,
    KvLayout,
    LatentSpec,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.plans import BlockCopy

CPU = torch.device("cpu")
GRANULE = 256
FULL, WINDOW, CHUNKS = 0, 1, 2
STATE = 3
# Blocks: 1536 B = 6 granules, 1280 B = 5 granules, 320 B = 2 granules with padding, 2 * 704 B = 6 granules.
GROUPS = [
    GroupLayout(FULL, FullAttentionSpec(2, 8, 8, 4), [0, 5, 6], 4, 20, 6),
    GroupLayout(WINDOW, SlidingWindowSpec(1, 20, 20, 4, 6), [1, 4], 4, 20, 5),
    GroupLayout(CHUNKS, ChunkedLocalSpec(1, 10, 10, 4, 8), [2], 4, 40, 2),
    GroupLayout(
        STATE,
        RecurrentSpec((StatePart("conv", (3, 5), 2), StatePart("state", (2, 7, 11), 4), StatePart("last", (6,), 4))),
        [3, 7],
        0,
        20,
        6,
        ["ssm", "ssm"],
    ),
]
LAYOUT = KvLayout(GROUPS, GRANULE, 60, 6, shared_layers=[(8, 4)])
DTYPES = {"conv": torch.bfloat16, "state": torch.float32, "last": torch.float32}
SCORING = Scoring(0.4)


def make(backend: str = "torch_exact", layout: KvLayout = LAYOUT) -> KvArena:
    return KvArena(layout, torch.float32, CPU, dict.fromkeys((FULL, WINDOW, CHUNKS), backend))


def context(starts: list[int], tokens: list[int], tables: dict[int, list[list[int]]]) -> StepContext:
    none: list[list[int]] = [[] for _ in starts]
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, tokens, strict=True)])
    return StepContext(positions, [RowBatch.of(starts, tokens, tables.get(g, none)) for g in range(len(GROUPS))])


def region(group: int, block: int) -> slice:
    return slice(block * GRANULE, block * GRANULE + GROUPS[group].block_bytes())


def test_memory_is_zero_and_as_large_as_the_layout_says() -> None:
    arena = make()
    assert arena.total_bytes == LAYOUT.total_bytes() == GRANULE * (6 + 360)
    assert not arena.memory.any()
    assert arena.groups == 4


@pytest.mark.parametrize("backend", ["torch_exact", "torch_sdpa"])
def test_groups_share_the_arena_and_leave_each_other_alone(backend: str) -> None:
    """Two rows through layers of every kind, step by step; each group's bytes change only inside its own blocks."""
    arena = make(backend)
    arena.memory[6 * GRANULE :] = 255
    arena.observe(torch.tensor([[math.nan]]))
    tables = {
        FULL: [[6, 12, 18], [24, 30, 36]],
        WINDOW: [[42, 47, 52], [57, 62, 67]],
        CHUNKS: [[72, 74, 76], [78, 80, 82]],
        STATE: [[84], [90]],
    }
    layers = {FULL: (0, 6), WINDOW: (1, 4), CHUNKS: (2,)}
    history: dict[tuple[int, int], list[torch.Tensor]] = {}
    for starts, tokens in (([0, 0], [3, 5]), ([3, 5], [4, 1]), ([7, 6], [1, 1]), ([8, 7], [3, 4])):
        step = context(starts, tokens, tables)
        for group, indices in layers.items():
            spec = GROUPS[group].spec
            before = arena.memory.clone()
            for index in indices:
                q, k, v = (torch.randn(sum(tokens), heads, spec.key_dim) for heads in (2, spec.kv_heads, spec.kv_heads))
                out = arena.attention(index, SCORING)(q, k, v, step)
                first = 0
                for row, count in enumerate(tokens):
                    part = slice(first, first + count)
                    held = history.setdefault((index, row), [torch.empty(2, 0, *k.shape[1:])])
                    held[0] = torch.cat((held[0], torch.stack((k[part], v[part]))), dim=1)
                    reach = {
                        "window_tokens": getattr(spec, "window_tokens", 0),
                        "chunk_tokens": getattr(spec, "chunk_tokens", 0),
                    }
                    want = causal_attention(q[part], *held[0], SCORING.scale, **reach)
                    torch.testing.assert_close(out[part], want, atol=2e-5, rtol=0)
                    first += count
            changed = (arena.memory != before).nonzero().flatten()
            own = torch.zeros_like(arena.memory, dtype=torch.bool)
            for table in tables[group]:
                for block in table:
                    own[region(group, block)] = True
            assert changed.numel() > 0
            assert own[changed].all()


def test_a_state_is_zero_at_the_start_and_kept_after() -> None:
    arena = make()
    arena.memory[6 * GRANULE :] = 255
    layers = [arena.state(3, DTYPES, "ssm"), arena.state(7, DTYPES, "ssm")]
    step = context([0, 4, 0], [4, 1, 2], {STATE: [[84], [90], [96]]})
    for layer in layers:
        rows = layer.rows(step)
        assert (rows.starts, rows.tokens, rows.fresh.tolist()) == ([0, 4, 0], [4, 1, 2], [True, False, True])
        for name, shape in (("conv", (3, 5)), ("state", (2, 7, 11)), ("last", (6,))):
            held = layer.read(name, rows)
            assert held.shape == (3, *shape)
            assert not held[[0, 2]].any()
            assert held[1].isnan().all(), "the second row goes on from what memory holds"
    before = arena.memory.clone()
    written = {}
    for place, layer in enumerate(layers):
        rows = layer.rows(step)
        for name, view in layer.views.items():
            value = torch.randn(3, *view.shape[1:]).to(view.dtype)
            written[place, name] = value
            layer.write(name, rows, value)
    after = context([4, 5, 2], [1, 1, 1], {STATE: [[84], [90], [96]]})
    for place, layer in enumerate(layers):
        for name, view in layer.views.items():
            assert torch.equal(layer.read(name, layer.rows(after)), written[place, name])
            assert torch.equal(view[90], written[place, name][1])
    own = torch.zeros_like(arena.memory, dtype=torch.bool)
    for block in (84, 90, 96):
        own[region(STATE, block)] = True
    assert torch.equal(arena.memory[~own], before[~own])


def test_copies_move_whole_blocks_in_order_and_nothing_else() -> None:
    arena = make()
    arena.memory.copy_(torch.randint(0, 256, arena.memory.shape, dtype=torch.uint8))
    want = arena.memory.clone()
    copies = [
        BlockCopy(CHUNKS, 20, 30),
        BlockCopy(STATE, 84, 90),
        BlockCopy(STATE, 90, 96),  # reads what the copy before wrote
        BlockCopy(FULL, 6, 12),
    ]
    for copy in copies:
        want[region(copy.group, copy.target)] = want[region(copy.group, copy.source)].clone()
    arena.copy(copies)
    assert torch.equal(arena.memory, want)
    state = arena.state(7, DTYPES, "ssm")
    for view in state.views.values():
        assert torch.equal(view[96].view(torch.uint8), view[84].view(torch.uint8))


def test_a_shared_layer_reads_its_sources_cache() -> None:
    arena = make()
    step = context([0], [9], {WINDOW: [[42, 47, 52]]})
    q, k, v = torch.randn(9, 2, 20), torch.randn(9, 1, 20), torch.randn(9, 1, 20)
    own = arena.attention(4, SCORING)(q, k, v, step)
    other = torch.randn(9, 2, 20)
    shared = arena.attention(8, SCORING)
    torch.testing.assert_close(shared(other, None, None, step), causal_attention(other, k, v, 0.4, window_tokens=6))
    torch.testing.assert_close(shared(q, None, None, step), own)
    with pytest.raises(InvariantError, match="exactly if its cache is its own"):
        shared(q, k, v, step)
    with pytest.raises(InvariantError, match="exactly if its cache is its own"):
        arena.attention(4, SCORING)(q, None, None, step)


def test_what_a_group_prepares_is_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make()
    step = context([0], [2], {FULL: [[6]], WINDOW: [[42]]})
    layers: list[LayerAttention] = [arena.attention(index, SCORING) for index in (0, 5, 1, 4)]
    calls = []
    for group, backend in arena._backends.items():
        whole = backend.prepare
        monkeypatch.setattr(backend, "prepare", lambda batch, g=group, w=whole: (calls.append(g), w(batch))[1])
    for layer, dim, heads in zip(layers, (8, 8, 20, 20), (2, 2, 1, 1), strict=True):
        layer(torch.randn(2, 2, dim), torch.randn(2, heads, dim), torch.randn(2, heads, dim), step)
    assert calls == [FULL, WINDOW]


def test_refusals() -> None:
    arena = make()
    with pytest.raises(InvariantError, match="recurrent cache and asks for attention"):
        arena.attention(3, SCORING, "ssm")
    with pytest.raises(InvariantError, match="full cache and asks for a state"):
        arena.state(0, DTYPES)
    with pytest.raises(InvariantError, match="no cache 'kv' of layer 3"):
        arena.state(3, DTYPES)
    with pytest.raises(InvariantError, match="state conv"):
        arena.state(3, {**DTYPES, "conv": torch.float32}, "ssm")
    latent = KvLayout([GroupLayout(0, LatentSpec(64), [0], 16, 5, 4)], GRANULE, 16, 1)
    with pytest.raises(UnsupportedModelError, match="latent"):
        KvArena(latent, torch.float32, CPU, {})
    with pytest.raises(InvariantError, match="without granules"):
        KvArena(KvLayout([GROUPS[STATE]], 0, 200, 5), torch.float32, CPU, {})
    odd = KvArena(KvLayout([GROUPS[STATE]], 10, 200, 5), torch.float32, CPU, {})
    with pytest.raises(InvariantError, match="granules of 10 B"):
        odd.state(3, DTYPES, "ssm")

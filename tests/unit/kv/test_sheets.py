"""The memory of published hybrids: fine attention blocks, and 95 % of 80 GB in use whenever it has to refuse."""

import pytest
from mixed_load import MixedLoad
from sheets import SHEETS

from headrace.engine.plan_memory import plan_split
from headrace.kv.budget import fixed_layout, make_layout
from headrace.types.cache_specs import CompressedSpec, KvLayout, RecurrentSpec

BUDGET_BYTES = 80 * 10**9
LEAST_SHARE = 0.95


def layout_of(name: str) -> KvLayout:
    return make_layout(
        SHEETS[name](),
        block_tokens=16,
        bytes_available=BUDGET_BYTES,
        num_blocks_override=None,
        max_model_len=131072,
    )


@pytest.mark.parametrize("name", SHEETS)
def test_attention_blocks_stay_fine_whatever_the_state_takes(name: str) -> None:
    layout = layout_of(name)
    assert layout.total_bytes() <= BUDGET_BYTES
    for group in layout.groups:
        if isinstance(group.spec, RecurrentSpec):
            assert group.block_tokens == 0
            continue
        coarse = isinstance(group.spec, CompressedSpec) and group.spec.ratio_tokens > 64
        assert 16 <= group.block_tokens <= (256 if coarse else 64)
        assert group.block_granules * layout.granule_bytes >= group.block_bytes()


@pytest.mark.parametrize("name", SHEETS)
def test_every_layer_and_part_is_in_exactly_one_group(name: str) -> None:
    declared = {(cache.layer_index, cache.part) for cache in SHEETS[name]()}
    placed = [
        (layer, part)
        for group in layout_of(name).groups
        for layer, part in zip(group.layer_indices, group.parts or ["kv"] * len(group.layer_indices), strict=True)
    ]
    assert sorted(placed) == sorted(declared)


@pytest.mark.parametrize("name", SHEETS)
def test_the_budget_is_used_under_a_load_that_changes_its_mix(name: str) -> None:
    # These two hold thousands of sequences, so that one round is as much work as several of the others.
    rounds = 1 if name in ("DeepSeek V4 Flash", "gpt-oss-20b") else 3
    load = MixedLoad(layout_of(name), BUDGET_BYTES, seed=1)
    load.run(rounds)
    assert len(load.shares) >= 18 * rounds, "a load that is never refused proves nothing"
    share, phase = min(load.shares)
    assert share >= LEAST_SHARE, f"refused at {share:.3f} of the budget while {phase} arrived"


@pytest.mark.parametrize("name", SHEETS)
def test_the_split_is_told_without_running_the_model(name: str) -> None:
    split = plan_split(SHEETS[name](), BUDGET_BYTES, block_tokens=16, max_len=32768, batch_tokens=2048)
    assert sum(group.share for group in split.groups) == pytest.approx(1.0)
    assert all(0 <= group.padding < 0.13 and group.request_blocks > 0 for group in split.groups)
    at_once = [row.requests for row in split.concurrency]
    assert at_once == sorted(at_once, reverse=True)
    assert at_once[-1] >= 1
    assert split.longest_tokens >= 32768
    assert split.extents * split.extent_bytes >= 0.99 * BUDGET_BYTES
    assert len(split.groups) <= 16, "every group costs bookkeeping"


def test_the_split_agrees_with_the_sheet_of_kimi_linear() -> None:
    """41.9 MB of states, 1.5 MB of convolutions and 8,064 bytes a token (kernels reference, 3.3)."""
    split = plan_split(SHEETS["Kimi Linear"](), BUDGET_BYTES, block_tokens=16, max_len=32768, batch_tokens=2048)
    states = [group for group in split.groups if group.kind == "recurrent"]
    (latent,) = [group for group in split.groups if group.kind == "latent"]
    assert sum(group.block_bytes for group in states) == 20 * (32 * 128 * 128 * 4 + 12288 * 3 * 2)
    assert (latent.block_bytes, latent.request_blocks) == (16 * 8064, 2048)
    eight = next(row.requests for row in split.concurrency if row.context_tokens == 8192)
    assert 0.94 <= eight * (43_417_600 + 8192 * 8064) / BUDGET_BYTES <= 1


def test_a_state_in_one_piece_would_strand_the_memory() -> None:
    """Why states are kept in pieces: with extents as large as a whole state the same load falls below the bound."""
    caches = SHEETS["Kimi Linear"]()
    layout = fixed_layout(caches, block_tokens=[0, 16], usable_blocks=[BUDGET_BYTES // 43_417_600 - 3, 300])
    load = MixedLoad(layout, BUDGET_BYTES, seed=1)
    load.run(2)
    assert min(load.shares)[0] < LEAST_SHARE

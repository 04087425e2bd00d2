"""The attention selector is pure: chosen, why, and why not the others, for devices that are not here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from headrace.attention import select as select_module
from headrace.attention.capability import BACKENDS, Capability
from headrace.attention.select import (
    AttentionNeed,
    AttentionRequest,
    CommonNeeds,
    load_backend,
    refusal,
    select,
    select_by_spec,
)
from headrace.base.errors import ConfigError, InvariantError, UnsupportedModelError
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GroupLayout,
    LatentSpec,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    StatePart,
)

CPU_FP32 = AttentionRequest("cpu", "float32", "float32", head_dim=64, heads=9, kv_heads=3)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "torch_sdpa"),
        ({"batch_invariant": True}, "torch_exact"),
        ({"dtype": "bfloat16", "cache_dtype": "bfloat16"}, "torch_sdpa"),
        ({"cache_dtype": "bfloat16"}, "torch_sdpa"),
        ({"device": "cuda", "dtype": "bfloat16", "cache_dtype": "bfloat16"}, "torch_sdpa"),
    ],
)
def test_choice(changes: dict[str, object], chosen: str) -> None:
    selection = select(replace(CPU_FP32, **changes))  # type: ignore[arg-type]
    assert selection.backend == chosen
    assert selection.reason
    assert set(selection.refused) == set(BACKENDS) - {chosen}
    assert all(selection.refused.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cuda", "batch_invariant": True}, "torch_exact: no cuda; torch_sdpa: not batch-invariant"),
        ({"graphs": True}, "cannot be captured in a graph"),
        ({"head_dim": 4096}, "head dim 4096 > 1024"),
        ({"device": "tpu"}, "no tpu"),
        ({"cache_dtype": "float8"}, "no float8 cache"),
    ],
)
def test_nothing_fits(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match="no attention backend fits") as caught:
        select(replace(CPU_FP32, **changes))  # type: ignore[arg-type]
    assert reason in caught.value.message


@pytest.mark.parametrize("need", ["sliding_window", "chunked_local", "sinks", "soft_cap"])
def test_each_mask_is_refused_where_the_record_does_not_have_it(need: str) -> None:
    asked = replace(CPU_FP32, **{need: True})
    for name, record in BACKENDS.items():
        assert getattr(record, need), f"{name} loses {need}: its parity tests must go too"
        assert refusal(asked, record) is None
        words = need.replace("_", " ") + (" attention" if need == "chunked_local" else "")
        assert refusal(asked, replace(record, **{need: False})) == f"no {words}"


FULL = FullAttentionSpec(2, 64, 64, 4)
WINDOW = SlidingWindowSpec(1, 128, 128, 4, 512)
CHUNKS = ChunkedLocalSpec(2, 64, 64, 4, 8192)
STATE = RecurrentSpec((StatePart("conv", (4, 8), 4),))
FP32 = CommonNeeds("cpu", "float32", "float32")


def test_each_spec_has_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = replace(BACKENDS["torch_sdpa"], max_head_dim=64, priority=30, soft_cap=False)
    monkeypatch.setattr(select_module, "BACKENDS", {"wide": BACKENDS["torch_sdpa"], "narrow": narrow})
    caches = [
        LayerCache(0, FULL),
        LayerCache(1, WINDOW),
        LayerCache(2, STATE, "state"),
        LayerCache(3, CHUNKS),
        LayerCache(4, SharedSpec(1)),
        LayerCache(5, NoCacheSpec()),
    ]
    needs = [AttentionNeed(0, 4), AttentionNeed(1, 4), AttentionNeed(3, 4), AttentionNeed(4, 4)]
    chosen = select_by_spec(caches, needs, FP32)
    assert {spec: choice.backend for spec, choice in chosen.items()} == {
        FULL: "narrow",
        WINDOW: "wide",
        CHUNKS: "narrow",
    }
    assert chosen[WINDOW].refused == {"narrow": "head dim 128 > 64"}
    # One layer of a group with a cap decides for the group; so does a layer that only reads the group's cache.
    capped = select_by_spec(caches, [*needs[:2], AttentionNeed(3, 4, soft_cap=True)], FP32)
    assert {spec: choice.backend for spec, choice in capped.items()} == {FULL: "narrow", WINDOW: "wide", CHUNKS: "wide"}
    assert capped[CHUNKS].refused == {"narrow": "no soft cap"}
    shared = [LayerCache(0, FULL), LayerCache(1, SharedSpec(0))]
    one = select_by_spec(shared, [AttentionNeed(0, 4), AttentionNeed(1, 4, soft_cap=True)], FP32)
    assert one[FULL].refused == {"narrow": "no soft cap"}
    with pytest.raises(ConfigError, match="narrow cannot be used: head dim 128 > 64"):
        select_by_spec(caches, needs, FP32, wanted="narrow")


def test_masks_reach_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(BACKENDS["torch_sdpa"], sliding_window=False, chunked_local=False, sinks=False, grouped_heads=False)
    monkeypatch.setattr(select_module, "BACKENDS", {"plain": plain})
    for spec, need, why in (
        (WINDOW, AttentionNeed(0, 1), "no sliding window"),
        (CHUNKS, AttentionNeed(0, 2), "no chunked local attention"),
        (FULL, AttentionNeed(0, 2, sinks=True), "no sinks"),
        (FULL, AttentionNeed(0, 4), "no grouped query heads"),
    ):
        with pytest.raises(ConfigError, match=why):
            select_by_spec([LayerCache(0, spec)], [need], FP32)
    assert select_by_spec([LayerCache(0, FULL)], [AttentionNeed(0, 2)], FP32)[FULL].backend == "plain"


def test_kinds_without_attention_here_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="latent"):
        select_by_spec([LayerCache(0, LatentSpec(1152))], [], FP32)
    with pytest.raises(InvariantError, match="layer 0 asks for attention over a recurrent cache"):
        select_by_spec([LayerCache(0, STATE)], [AttentionNeed(0, 4)], FP32)
    assert select_by_spec([LayerCache(0, STATE)], [], FP32) == {}


def test_asked_for_by_name() -> None:
    selection = select(CPU_FP32, wanted="torch_exact")
    assert (selection.backend, selection.reason) == ("torch_exact", "asked for")
    assert selection.refused == {"torch_sdpa": "torch_exact was asked for"}
    with pytest.raises(ConfigError, match="torch_exact cannot be used: no bfloat16 activations"):
        select(replace(CPU_FP32, dtype="bfloat16"), wanted="torch_exact")
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; known: auto, torch_exact"):
        select(CPU_FP32, wanted="flash")


def test_capabilities_default_to_no() -> None:
    assert refusal(CPU_FP32, Capability()) == "no cpu"
    able = Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        cache_dtypes=frozenset({"float32"}),
        max_head_dim=64,
        causal=True,
    )
    assert refusal(CPU_FP32, able) == "no grouped query heads"
    assert refusal(replace(CPU_FP32, kv_heads=9), able) is None
    assert refusal(replace(CPU_FP32, kv_heads=9), replace(able, head_dim_multiple=48)) is not None


def test_ties_go_by_name_and_say_so() -> None:
    able = replace(BACKENDS["torch_sdpa"], priority=5)
    selection = select(CPU_FP32, candidates={"b": able, "a": able, "c": replace(able, priority=6)})
    assert selection.backend == "c"
    assert selection.refused["a"] == "c has priority 6 over 5"


def test_loads_every_backend() -> None:
    import torch

    from headrace.attention.memory import BlockMemory, Finite

    arena = torch.zeros(4 * 8192, dtype=torch.uint8)
    memory = BlockMemory(GroupLayout(0, FULL, [0], 4, 4, 2), arena, 4096, torch.float32, Finite(True))
    for name, record in BACKENDS.items():
        backend = load_backend(name, memory)
        assert (backend.name, backend.capability) == (name, record)
    with pytest.raises(ConfigError, match="unknown attention backend"):
        load_backend("none", memory)


def test_choosing_needs_no_torch() -> None:
    code = "import sys, headrace.attention.select; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

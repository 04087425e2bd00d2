"""The attention selector is pure: chosen, why, and why not the others, for devices that are not here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from headrace.attention.capability import BACKENDS, Capability
from headrace.attention.select import AttentionRequest, load_backend, refusal, select
from headrace.base.errors import ConfigError

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
        ({"sliding_window": True}, "no sliding window"),
        ({"sinks": True}, "no sinks"),
        ({"soft_cap": True}, "no soft cap"),
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
    for name, record in BACKENDS.items():
        backend = load_backend(name)
        assert (backend.name, backend.capability) == (name, record)
    with pytest.raises(ConfigError, match="unknown attention backend"):
        load_backend("none")


def test_choosing_needs_no_torch() -> None:
    code = "import sys, headrace.attention.select; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

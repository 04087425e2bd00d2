"""What this machine says about itself, and the dtype rule."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.platforms import detect


def test_cpu() -> None:
    platform = detect.current_platform("cpu")
    assert (platform.name, platform.device.type) == ("cpu", "cpu")
    assert 0 < platform.available_bytes <= platform.total_bytes
    assert platform.threads >= 1
    assert platform.architecture


def test_a_smaller_control_group_is_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "max").write_text("1000000\n")
    (tmp_path / "used").write_text("400000\n")
    monkeypatch.setattr(detect, "_CGROUP_LIMIT", tmp_path / "max")
    monkeypatch.setattr(detect, "_CGROUP_USED", tmp_path / "used")
    platform = detect.current_platform("cpu")
    assert (platform.total_bytes, platform.available_bytes) == (1000000, 600000)
    (tmp_path / "max").write_text("max\n")
    assert detect.current_platform("cpu").total_bytes > 1000000


@pytest.mark.parametrize(
    ("name", "requested", "checkpoint", "want"),
    [
        ("cpu", "auto", "float32", torch.float32),
        ("cpu", "auto", "bfloat16", torch.bfloat16),
        ("cpu", "auto", "float16", torch.bfloat16),
        ("cuda", "auto", "float32", torch.bfloat16),
        ("cpu", "float32", "bfloat16", torch.float32),
        ("cuda", "float16", "bfloat16", torch.float16),
    ],
)
def test_dtype_rule(name: str, requested: str, checkpoint: str, want: torch.dtype) -> None:
    assert replace(detect.current_platform("cpu"), name=name).dtype(requested, checkpoint) == want


def test_refusals() -> None:
    platform = detect.current_platform("cpu")
    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        platform.dtype("float16", "float16")
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        platform.dtype("int3", "float32")
    with pytest.raises(ConfigError, match="unknown device 'abacus'"):
        detect.current_platform("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda() -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        detect.current_platform("cuda")
    assert detect.current_platform("auto").name == "cpu"


def test_import_is_lazy() -> None:
    code = "import sys, headrace.platforms.detect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""How a model runs here: quantisation and threads. Pure rules; must not touch a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from headrace.base.errors import ConfigError
from headrace.config.engine import ModelConfig

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def choose_quantization(config: ModelConfig, device: str, *, quantized: bool) -> Literal["none", "int8"]:
    """Return "int8" or "none" for the linears.

    Args:
        config: uses dtype and quantization.
        device: "cpu" or "cuda", resolved.
        quantized: True if the stored weights are quantised.

    Raises:
        ConfigError: int8 on a device without a path for it.
    """
    if config.quantization == "int8" and device != "cpu":
        raise ConfigError("--quantization int8 is a CPU path; remove it or use --device cpu", param="quantization")
    if config.quantization == "auto":
        return "int8" if quantized and device == "cpu" and config.dtype == "auto" else "none"
    return "int8" if config.quantization == "int8" else "none"


def usable_cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Return how many cores this process may use: its affinity, bounded by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without the file (no control group, or an older kind) affinity alone counts.
    quota, period = quota_file.read_text().split()[:2] if quota_file.is_file() else ("max", "0")
    return cores if quota == "max" else min(cores, max(1, round(int(quota) / int(period))))


def rank_threads(cpu_threads: int | None, ranks: int) -> int:
    """Return the threads of one rank on a CPU: as given, else this machine's cores shared by the ranks."""
    return cpu_threads or max(1, usable_cores() // ranks)

"""Where and how a model runs: type of weights, quantisation, threads. Pure rules; must not touch a device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.config.engine import ModelConfig

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Precision:
    """How numbers are kept.

    Attributes:
        dtype: float32, bfloat16 or float16, of weights and activations.
        quantization: none or int8.
        reason: why, in words, for the log.
    """

    dtype: str
    quantization: str
    reason: str


def choose_precision(config: ModelConfig, device: str, checkpoint_dtype: str, *, quantized: bool) -> Precision:
    """Return the type and quantisation of a model.

    Args:
        config: uses dtype and quantization.
        device: "cpu" or "cuda", resolved.
        checkpoint_dtype: type of the stored weights.
        quantized: True if the stored weights are quantised.

    Raises:
        ConfigError: a combination that the device has no path for.
    """
    on_cpu = device == "cpu"
    if config.dtype == "float16" and on_cpu:
        raise ConfigError("float16 has no fast path on CPUs; use --dtype bfloat16 or float32", param="dtype")
    if config.quantization == "int8":
        if not on_cpu:
            raise ConfigError("--quantization int8 is a CPU path; remove it or use --device cpu", param="quantization")
        return Precision("float32", "int8", "asked for int8 linears; activations are float32")
    if config.dtype != "auto":
        return Precision(config.dtype, "none", "dtype as given")
    if not on_cpu:
        return Precision("bfloat16", "none", "bfloat16 is the rule on a GPU")
    if quantized and config.quantization == "auto":
        return Precision("float32", "int8", "the stored weights are quantised, so linears run in int8")
    if checkpoint_dtype in ("bfloat16", "float16"):
        return Precision("bfloat16", "none", f"the stored weights are {checkpoint_dtype}")
    return Precision("float32", "none", f"the stored weights are {checkpoint_dtype}")


def usable_cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Return how many cores this process may use: its affinity, bounded by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without the file (no control group, or an older kind) affinity alone counts.
    quota, period = quota_file.read_text().split()[:2] if quota_file.is_file() else ("max", "0")
    return cores if quota == "max" else min(cores, max(1, round(int(quota) / int(period))))


def rank_threads(cpu_threads: int | None, ranks: int) -> int:
    """Return the threads of one rank on a CPU: as given, else this machine's cores shared by the ranks."""
    return cpu_threads or max(1, usable_cores() // ranks)

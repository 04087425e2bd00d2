"""Asks this machine what it is: device, memory, vector instructions, and the dtype rule that follows.

Answers questions only; must not change any setting. torch is imported inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    import torch

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_FLOAT16_MATMUL_NOTE = "float16 matmul on CPUs is up to 150 times slower than bfloat16"


@dataclass(frozen=True)
class Platform:
    """One device and what it can do.

    Attributes:
        name: "cpu" or "cuda".
        device: for tensors.
        total_bytes: memory of the device (of the control group, where it is smaller).
        available_bytes: of that, not in use when asked.
        architecture: torch's CPU capability ("AVX512", ...) or "sm_90" and the like.
        threads: threads of a torch operator on a CPU; 0 on a GPU.
    """

    name: str
    device: torch.device
    total_bytes: int
    available_bytes: int
    architecture: str
    threads: int

    def dtype(self, requested: str, checkpoint_dtype: str) -> torch.dtype:
        """Choose the type of weights and activations.

        Args:
            requested: "auto" or a name of `config.engine.DTYPES`.
            checkpoint_dtype: type in the checkpoint's config ("float16", ...).

        Returns:
            auto: bfloat16 on a GPU; on a CPU bfloat16 for bfloat16 and float16 checkpoints, else float32.

        Raises:
            ConfigError: float16 on a CPU, or an unknown name.
        """
        import torch

        if requested == "auto":
            half = checkpoint_dtype in ("bfloat16", "float16")
            return torch.bfloat16 if self.name != "cpu" or half else torch.float32
        known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if requested not in known:
            raise ConfigError(f"unknown dtype {requested!r}; known: auto, {', '.join(known)}", param="dtype")
        if self.name == "cpu" and requested == "float16":
            raise ConfigError(f"{_FLOAT16_MATMUL_NOTE}; use --dtype bfloat16 or float32", param="dtype")
        return known[requested]


def current_platform(device: str = "auto") -> Platform:
    """Describe the device that the model will run on.

    Args:
        device: "auto" (a GPU where torch sees one), "cpu" or "cuda".

    Raises:
        ConfigError: cuda asked for and not there, or an unknown name.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}; known: auto, cpu, cuda", param="device")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu", param="device")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return _cpu()
    return _cuda()


def _cpu() -> Platform:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit = _read_count(_CGROUP_LIMIT)
    if limit is not None and limit < total:
        total = limit
        available = min(available, max(limit - (_read_count(_CGROUP_USED) or 0), 0))
    capability = torch.backends.cpu.get_cpu_capability()
    return Platform("cpu", torch.device("cpu"), total, available, capability, torch.get_num_threads())


def _cuda() -> Platform:
    import torch

    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return Platform("cuda", torch.device("cuda", index), int(total), int(free), f"sm_{major}{minor}", 0)


def _read_count(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

"""How many bytes the KV cache of a rank may have. Pure arithmetic; the numbers are measured by the worker."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import InsufficientMemoryError
from headrace.config.engine import CacheConfig

CPU_CACHE_BYTES_MAX = 8 << 30


@dataclass(frozen=True)
class GpuUse:
    """Memory of a GPU after the weights are loaded and a largest step has been tried.

    Attributes:
        total_bytes: of the device.
        used_bytes: by everything on the device now, other programs included.
        activation_bytes: peak of the largest step above what stays allocated.
    """

    total_bytes: int
    used_bytes: int
    activation_bytes: int


def cpu_cache_bytes(config: CacheConfig, available_bytes: int, ranks: int) -> int:
    """Return the KV bytes of one rank on a CPU.

    A size that is given holds for each rank; a share of the machine is divided between the ranks.

    Args:
        config: uses kv_cache_memory_bytes and cpu_memory_share.
        available_bytes: free memory of the machine with the weights loaded.
        ranks: processes that share the machine.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    return min(CPU_CACHE_BYTES_MAX, int(config.cpu_memory_share * available_bytes)) // ranks


def gpu_cache_bytes(config: CacheConfig, use: GpuUse) -> int:
    """Return the KV bytes of one rank on a GPU: what the allowed share leaves after weights and activations.

    Raises:
        InsufficientMemoryError: nothing is left.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    allowed = int(config.gpu_memory_utilization * use.total_bytes)
    left = allowed - use.used_bytes - use.activation_bytes
    if left <= 0:
        raise InsufficientMemoryError(
            f"no memory is left for the KV cache: {_gib(allowed)} allowed (--gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g} of {_gib(use.total_bytes)}), {_gib(use.used_bytes)} in use, "
            f"{_gib(use.activation_bytes)} needed by the largest step; raise --gpu-memory-utilization, lower "
            "--max-num-batched-tokens, or use more ranks",
            param="gpu_memory_utilization",
        )
    return left


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / (1 << 30):.2f} GiB"

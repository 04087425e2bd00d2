"""Rules of quantisation, threads and KV bytes."""

from __future__ import annotations

import pytest

from headrace.base.errors import ConfigError, InsufficientMemoryError
from headrace.config.engine import CacheConfig, ModelConfig
from headrace.worker.memory import CPU_CACHE_BYTES_MAX, GpuUse, cpu_cache_bytes, gpu_cache_bytes
from headrace.worker.placement import choose_quantization, rank_threads, usable_cores

GIB = 1 << 30


@pytest.mark.parametrize(
    ("quantization", "dtype", "device", "quantized", "want"),
    [
        ("auto", "auto", "cpu", True, "int8"),
        ("auto", "auto", "cpu", False, "none"),
        ("auto", "bfloat16", "cpu", True, "none"),
        ("auto", "float32", "cpu", True, "none"),
        ("auto", "auto", "cuda", True, "none"),
        ("none", "auto", "cpu", True, "none"),
        ("int8", "auto", "cpu", False, "int8"),
    ],
)
def test_quantization(quantization, dtype, device, quantized, want):
    config = ModelConfig(model="m", quantization=quantization, dtype=dtype)
    assert choose_quantization(config, device, quantized=quantized) == want


def test_int8_on_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="CPU path"):
        choose_quantization(ModelConfig(model="m", quantization="int8"), "cuda", quantized=False)


def test_threads(tmp_path):
    quota = tmp_path / "cpu.max"
    assert rank_threads(5, 2) == 5
    assert rank_threads(None, 1) == usable_cores()
    assert rank_threads(None, 10**6) == 1
    unlimited = usable_cores(quota)
    for text, want in (("max 100000", unlimited), ("100000 100000", 1), ("50000 100000", 1)):
        quota.write_text(text)
        assert usable_cores(quota) == want


def test_cpu_cache_bytes():
    config = CacheConfig(cpu_memory_share=0.5)
    assert cpu_cache_bytes(config, 4 * GIB, 1) == 2 * GIB
    assert cpu_cache_bytes(config, 4 * GIB, 2) == GIB
    assert cpu_cache_bytes(config, 400 * GIB, 1) == CPU_CACHE_BYTES_MAX
    assert cpu_cache_bytes(CacheConfig(kv_cache_memory_bytes=123), 4 * GIB, 2) == 123


def test_gpu_cache_bytes():
    config = CacheConfig(gpu_memory_utilization=0.5)
    assert gpu_cache_bytes(config, GpuUse(100 * GIB, 20 * GIB, 5 * GIB)) == 25 * GIB
    assert gpu_cache_bytes(CacheConfig(kv_cache_memory_bytes=9), GpuUse(GIB, GIB, GIB)) == 9
    with pytest.raises(InsufficientMemoryError, match=r"--gpu-memory-utilization 0\.5 of 10\.00 GiB"):
        gpu_cache_bytes(config, GpuUse(10 * GIB, 4 * GIB, 2 * GIB))

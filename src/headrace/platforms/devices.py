"""A table of devices for planning without them: memory, bandwidth and matrix rate by name.

Facts only, from the vendors' data sheets (dense bfloat16, no sparsity). Must not import torch or look at this machine:
what is really there is asked in `headrace.platforms.detect`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from headrace.base.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class DeviceRecord:
    """One device.

    Attributes:
        name: word for ``--device``.
        kind: "gpu" or "cpu".
        memory_bytes: memory that software sees; 0 means the memory of the machine at hand (CPU).
        bandwidth_bytes_per_s: peak memory bandwidth.
        bf16_flops: dense bfloat16 operations a second (a multiply-add is two).
        reserved_bytes: memory that the driver, its context and libraries take before any tensor.
        note: where the figures come from.
    """

    name: str
    kind: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops: float
    reserved_bytes: int
    note: str


def _gpu(name: str, memory_gib: float, bandwidth_tb: float, bf16_tflops: float, note: str) -> DeviceRecord:
    return DeviceRecord(name, "gpu", int(memory_gib * GIB), bandwidth_tb * 1e12, bf16_tflops * 1e12, 700 << 20, note)


DEVICES: dict[str, DeviceRecord] = {
    record.name: record
    for record in (
        _gpu(
            "h200",
            143771 / 1024,
            4.8,
            989.0,
            "H200 SXM; memory as reported by the driver; 4.29 TB/s and 800 TFLOP/s measured",
        ),
        _gpu("h100", 81559 / 1024, 3.35, 989.0, "H100 SXM5 80 GB"),
        _gpu("h100-pcie", 81559 / 1024, 2.0, 756.0, "H100 PCIe 80 GB"),
        _gpu("a100-80g", 81920 / 1024, 2.039, 312.0, "A100 SXM4 80 GB"),
        _gpu("a100-40g", 40960 / 1024, 1.555, 312.0, "A100 SXM4 40 GB"),
        _gpu("l40s", 46068 / 1024, 0.864, 362.0, "L40S 48 GB"),
        _gpu("l4", 23034 / 1024, 0.300, 121.0, "L4 24 GB"),
        _gpu("rtx-4090", 24564 / 1024, 1.008, 165.2, "GeForce RTX 4090 24 GB"),
        _gpu("b200", 183359 / 1024, 8.0, 2250.0, "B200 SXM 192 GB"),
        _gpu("mi300x", 192.0, 5.3, 1307.4, "Instinct MI300X 192 GB"),
        DeviceRecord(
            "cpu", "cpu", 0, 50e9, 0.4e12, 0, "a small server CPU with AVX512 and BF16; measured order of magnitude"
        ),
    )
}


def device_record(name: str) -> DeviceRecord:
    """Return the record of a device.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    record = DEVICES.get(name.lower())
    if record is None:
        found = difflib.get_close_matches(name.lower(), DEVICES, n=1)
        hint = f" (did you mean {found[0]}?)" if found else ""
        raise ConfigError(f"unknown device {name!r}{hint}; known: {', '.join(DEVICES)}", param="device")
    return record

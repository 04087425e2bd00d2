"""Unpacks GGUF tensor data to float32, with torch and without loops over values.

Source of the layouts: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp. The arithmetic rounds in the same order as
there (scale times value, rounded, then plus the minimum), so results are bit-equal to gguf-py. Must not know names of
tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.base.errors import UnsupportedModelError, WeightLoadError
from headrace.weights.gguf_types import TYPE_BY_NAME

# Values unpacked at once: 1 MiB of float32, so that the temporaries stay in the cache of a core.
_CHUNK_VALUES = 1 << 18


def dequantize(raw: np.ndarray, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Unpack one tensor.

    Args:
        raw: stored bytes, uint8 [size_bytes].
        type_name: one of the keys of `TYPE_BY_NAME`.
        shape: outermost dimension first.

    Returns:
        float32 of ``shape``, in memory of its own.

    Raises:
        UnsupportedModelError: unknown type.
        WeightLoadError: ``raw`` has another size than ``shape`` needs.
    """
    kind = TYPE_BY_NAME.get(type_name)
    if kind is None:
        raise UnsupportedModelError(f"tensor type {type_name} is not supported; supported: {', '.join(TYPE_BY_NAME)}")
    values = int(np.prod(shape, dtype=np.int64))
    if values % kind.block_values or raw.size != values // kind.block_values * kind.block_bytes:
        raise WeightLoadError(f"{raw.size} bytes do not hold a {type_name} tensor of shape {list(shape)}")
    data = torch.from_numpy(raw)
    if not kind.quantized:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
        # `to` with a copy also moves the values out of the mapped file, whose start need not be aligned to 4 bytes.
        return _aligned(data).view(dtype).to(torch.float32, copy=True).reshape(shape)
    blocks = data.view(-1, kind.block_bytes)
    out = torch.empty(blocks.shape[0], kind.block_values, dtype=torch.float32)
    unpack = _UNPACK[type_name]
    step = max(1, _CHUNK_VALUES // kind.block_values)
    for start in range(0, blocks.shape[0], step):
        unpack(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    return data if data.data_ptr() % 8 == 0 else data.clone()


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte ``at`` of each block as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Write the low nibbles of ``packed`` to ``out[..., 0, :]`` and the high ones to ``out[..., 1, :]``."""
    out.select(-2, 0).copy_(packed & 15)
    out.select(-2, 1).copy_(packed >> 4)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:18], out.view(-1, 2, 16))
    out.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:20], out.view(-1, 2, 16))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 6:22], out.view(-1, 2, 16))
    # Bit i of the four bytes 2..5 (little endian) is the fifth bit of value i.
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (blocks[:, 2:6].unsqueeze(-1) >> shifts) & 1
    out.add_(fifth.view(-1, 32) << 4).sub_(16.0).mul_(_half(blocks, 0))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:34].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scales, minima) of the eight sub-blocks of Q4_K and Q5_K as float32 [blocks, 8, 1].

    Twelve bytes hold sixteen 6-bit numbers: bytes 0..3 are scales 0..3 and bytes 4..7 minima 0..3 in their low six
    bits; bytes 8..11 have the low nibbles of scales 4..7 (low half) and minima 4..7 (high half), whose two upper bits
    are the upper bits of bytes 0..3 and 4..7.
    """
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], dim=1)
    scale = _half(blocks, 0) * scales.to(torch.float32)
    minimum = _half(blocks, 2) * minima.to(torch.float32)
    return scale.unsqueeze(-1), minimum.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, minimum = _k_scales(blocks)
    _nibbles(blocks[:, 16:144].view(torch.uint8).reshape(-1, 4, 32), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).mul_(scale).sub_(minimum)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, minimum = _k_scales(blocks)
    _nibbles(blocks[:, 48:176].reshape(-1, 4, 32), out.view(-1, 4, 2, 32))
    # Bit s of byte i is the fifth bit of value i of sub-block s.
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    out.view(-1, 8, 32).add_(fifth).mul_(scale).sub_(minimum)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # Two halves of 128 values. In a half, 64 bytes hold the low nibbles of four rows of 32 values: rows 0 and 1 are the
    # low nibbles, rows 2 and 3 the high ones. 32 bytes hold the upper two bits, two for each row.
    low = blocks[:, 0:128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    view = out.view(-1, 2, 2, 64)
    _nibbles(low, view)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    out.view(-1, 2, 4, 32).add_(((high >> shifts) & 3) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32) * _half(blocks, 208)
    out.sub_(32.0).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_UNPACK: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

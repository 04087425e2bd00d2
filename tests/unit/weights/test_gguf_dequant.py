from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.base.errors import UnsupportedModelError, WeightLoadError
from headrace.weights.gguf_dequant import dequantize
from headrace.weights.gguf_file import GgufFile
from headrace.weights.gguf_types import TYPE_BY_NAME, TYPES


def reference(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def test_the_table_of_sizes_equals_the_reference() -> None:
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block_values, kind.block_bytes)


@pytest.mark.parametrize("name", sorted(TYPE_BY_NAME))
@pytest.mark.parametrize("blocks", [1, 3, 2500])
def test_random_blocks_are_bit_equal_to_the_reference(name: str, blocks: int) -> None:
    kind = TYPE_BY_NAME[name]
    columns = 1 if kind.quantized else 8
    raw = np.random.default_rng(blocks).integers(0, 256, (blocks, kind.block_bytes * columns), dtype=np.uint8)
    expected = reference(raw, name)
    got = dequantize(raw.reshape(-1), name, (blocks, kind.block_values * columns))
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantised_values_come_back_close(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    got = dequantize(np.ascontiguousarray(raw).reshape(-1), name, (64, 64)).numpy()
    assert np.abs(got - values).max() < (0.02 if name == "Q8_0" else 0.4)


def test_every_tensor_of_smollm_is_bit_equal_to_the_reference(smollm_path: Path) -> None:
    file = GgufFile(smollm_path)
    names = [name for name in file.tensors if name.startswith(("blk.0.", "blk.29.", "output"))]
    assert {file.tensors[name].type.name for name in names} == {"Q4_1", "F32"}
    for name in names:
        tensor = file.tensors[name]
        got = dequantize(file.raw(name), tensor.type.name, tensor.shape)
        expected = reference(
            file.raw(name).reshape(tensor.shape[0], -1) if len(tensor.shape) == 2 else file.raw(name), tensor.type.name
        )
        assert np.array_equal(got.numpy(), expected.reshape(tensor.shape))
    rows = 64
    head = file.raw("token_embd.weight").reshape(49152, -1)[-rows:]
    got = dequantize(head.reshape(-1), "Q8_0", (rows, 576))
    assert np.array_equal(got.numpy(), reference(head, "Q8_0"))


def test_the_whole_of_smollm_takes_less_than_a_second_of_one_core(smollm_path: Path) -> None:
    file = GgufFile(smollm_path)
    names = [name for name in file.tensors if name.startswith(tuple(f"blk.{layer}." for layer in range(10)))]

    def seconds() -> float:
        start = time.process_time()
        for name in names:
            dequantize(file.raw(name), file.tensors[name].type.name, file.tensors[name].shape)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 1.0  # a third of the layers; measured 0.1 s


def test_results_do_not_share_memory_with_the_file(smollm_path: Path) -> None:
    file = GgufFile(smollm_path)
    first = dequantize(file.raw("output_norm.weight"), "F32", (576,))
    before = first.clone()
    first.zero_()
    assert torch.equal(dequantize(file.raw("output_norm.weight"), "F32", (576,)), before)


def test_wrong_sizes_and_types_are_refused() -> None:
    raw = np.zeros(20, np.uint8)
    with pytest.raises(WeightLoadError, match=r"20 bytes do not hold a Q4_1 tensor of shape \[64\]"):
        dequantize(raw, "Q4_1", (64,))
    with pytest.raises(WeightLoadError):
        dequantize(raw, "Q4_1", (33,))
    with pytest.raises(UnsupportedModelError, match="IQ2_XS"):
        dequantize(raw, "IQ2_XS", (32,))

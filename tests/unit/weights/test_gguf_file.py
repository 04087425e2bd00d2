from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.base.errors import HeadraceError, ModelSourceError, UnsupportedModelError, WeightLoadError
from headrace.weights.gguf_file import GgufFile

METADATA = {
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "some.flag": True,
    "some.text": "čau 你好",
    "some.strings": ["a", "", "č😀"],
    "some.numbers": [1, -2, 3],
    "some.floats": [0.5, -1.25],
}


@pytest.fixture
def small(write_gguf: Callable[..., Path]) -> Path:
    rng = np.random.default_rng(0)
    return write_gguf(
        METADATA,
        {
            "token_embd.weight": rng.standard_normal((6, 32), dtype=np.float32),
            "output_norm.weight": np.ones(32, np.float32),
        },
    )


def test_reads_what_the_reference_writer_wrote(small: Path) -> None:
    file = GgufFile(small)
    assert {
        key: list(value) if key == "some.strings" else value for key, value in file.metadata.items() if key in METADATA
    } == METADATA
    assert file.metadata["some.strings"][1:] == ["", "č😀"]
    assert file.metadata["some.strings"].tolist() == METADATA["some.strings"]
    oracle = gguf.GGUFReader(small)
    assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        assert file.tensors[tensor.name].shape == tuple(int(size) for size in tensor.shape[::-1])
        assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()
    assert not file.quantized


def test_smollm_equals_the_reference_reader_where_it_is_cheap(smollm_path: Path) -> None:
    file = GgufFile(smollm_path)
    assert len(file.tensors) == 272
    assert file.quantized
    assert file.metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert file.tensors["blk.0.ffn_down.weight"].offset_bytes == 31868992


def test_a_vocabulary_of_98k_strings_is_read_in_well_under_a_third_of_a_second(smollm_path: Path) -> None:
    best = min(_seconds_of_cpu(smollm_path) for _ in range(3))
    assert best < 0.3


def _seconds_of_cpu(path: Path) -> float:
    start = time.process_time()
    file = GgufFile(path)
    assert (
        len(file.metadata["tokenizer.ggml.tokens"].tolist()) + len(file.metadata["tokenizer.ggml.merges"].tolist())
        == 98052
    )
    return time.process_time() - start


def test_every_truncation_is_a_typed_error(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    header = whole.index(b"output_norm.weight") + 60
    for size in [*range(0, header, 3), *range(header, len(whole), 97), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises((WeightLoadError, ModelSourceError)):
            GgufFile(cut)


def test_random_damage_never_escapes_as_another_error(small: Path, tmp_path: Path) -> None:
    whole, rng = small.read_bytes(), random.Random(7)
    damaged = tmp_path / "damaged.gguf"
    failures = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(400)] = rng.randrange(256)
        damaged.write_bytes(data)
        try:
            file = GgufFile(damaged)
            for name in file.tensors:
                file.raw(name)
        except HeadraceError:
            failures += 1
    assert failures > 50


@pytest.mark.parametrize(
    ("position", "value"),
    [(8, 1 << 40), (16, 1 << 40), (8, (1 << 64) - 1), (16, (1 << 64) - 1)],
)
def test_absurd_counts_are_refused_before_anything_is_allocated(small: Path, position: int, value: int) -> None:
    data = bytearray(small.read_bytes())
    data[position : position + 8] = struct.pack("<Q", value)
    small.write_bytes(data)
    with pytest.raises(WeightLoadError, match="announces"):
        GgufFile(small)


def test_an_absurd_array_length_is_refused(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({"x": ["abc"]})
    data = path.read_bytes()
    at = data.index(struct.pack("<IQQ", 8, 1, 3)) + 4
    path.write_bytes(data[:at] + struct.pack("<Q", 1 << 50) + data[at + 8 :])
    with pytest.raises(WeightLoadError, match="strings in 'x'"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big endian"),
    ],
)
def test_other_files_and_versions_are_named(tmp_path: Path, head: bytes, text: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    with pytest.raises(ModelSourceError, match=text):
        GgufFile(path)


def test_an_unsupported_tensor_type_is_named(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({}, {"w": np.ones((2, 256), np.float32)})
    data = bytearray(path.read_bytes())
    at = data.index(b"w" + struct.pack("<I", 2)) + 1 + 4 + 16
    data[at : at + 4] = struct.pack("<I", 10)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"tensor 'w' has type Q2_K.*Q4_K"):
        GgufFile(path)


def test_a_missing_file_and_a_directory_are_model_source_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelSourceError):
            GgufFile(path)

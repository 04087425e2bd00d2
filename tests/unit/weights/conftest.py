"""Tiny GGUF files and safetensors directories, written by the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.weights.source import default_model_path

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return default_model_path()


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer: metadata (keys as in the file) and float32 tensors -> path."""

    def write(
        metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray] = {}, name: str = "m.gguf", arch: str = "llama"
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for tensor_name, tensor in tensors.items():
            writer.add_tensor(tensor_name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of a Hugging Face directory: shards of tensors, and JSON files by name."""

    def write(shards: Mapping[str, Mapping[str, torch.Tensor]], name: str = "model", **files: Any) -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        for shard, tensors in shards.items():
            save_file(dict(tensors), path / shard)
        files.setdefault("config", {"architectures": ["LlamaForCausalLM"]})
        for stem, content in files.items():
            (path / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
        return path

    return write

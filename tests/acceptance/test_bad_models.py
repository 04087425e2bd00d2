"""A model that cannot be served ends `headrace serve` with one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from smollm2_samples import default_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def _serve(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", *arguments, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def _directory(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return tmp_path


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_missing_directory(tmp_path: Path) -> None:
    code, text = _serve(str(tmp_path / "nothing-here"))
    assert code == 2
    assert "nothing-here" in _last_line(text)


def test_wrong_architecture(tmp_path: Path) -> None:
    code, text = _serve(str(_directory(tmp_path, architectures=["BloomForCausalLM"])), "--load-format", "dummy")
    assert code == 2
    assert "BloomForCausalLM" in text
    assert "LlamaForCausalLM" in text, "the message should say what is supported"


def test_truncated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(default_gguf().read_bytes()[:20_000_000])
    code, text = _serve(str(path))
    assert code == 2
    assert "cut.gguf" in text


def test_garbage_gguf(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 64)
    code, text = _serve(str(path))
    assert code == 2
    assert "noise.gguf" in text


@pytest.mark.parametrize("keep", [4, 200, 5000])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    import torch
    from safetensors.torch import save_file

    directory = _directory(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(256, 64)}, str(directory / "model.safetensors"))
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    code, text = _serve(str(directory))
    assert code == 2
    assert "model.safetensors" in text


def test_missing_weights_are_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    directory = _directory(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(256, 64)}, str(directory / "model.safetensors"))
    code, text = _serve(str(directory))
    assert code == 2
    assert "model.layers.0" in text


def test_pickle_weights_are_refused(tmp_path: Path) -> None:
    directory = _directory(tmp_path)
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    code, text = _serve(str(directory))
    assert code == 2
    assert "safetensors" in text


def test_option_combination_is_refused() -> None:
    code, text = _serve("default", "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    assert code == 2
    assert "--max-num-batched-tokens" in text

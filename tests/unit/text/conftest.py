"""The SmolLM2 tokenizer, transformers' reading of the same file, and small tokenizers written by the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.config import ModelConfig
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.weights.source import resolve_model

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it isn't he'll or we've 123 4567.",
    "def value(self, other):\n    return self.total + other.total  # naïve café\n",
    "Peter Piper picked a peck of pickled peppers. 中文测试 你好世界 你好",
    "the theory of the other there then them these those they're",
    "for i in range(10):\n\tprint(i, i ** 2)\n\n",
] * 3


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model(ModelConfig(model="default")))


@pytest.fixture(scope="session")
def reference() -> Any:
    """transformers' tokenizer of the same GGUF file."""
    from transformers import AutoTokenizer

    path = resolve_model(ModelConfig(model="default")).gguf_path
    assert path is not None
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="session")
def exact_reference(reference: Any) -> tokenizers.Tokenizer:
    """The same with the digit split that SmolLM2's own tokenizer.json has and transformers' conversion leaves out."""
    exact = tokenizers.Tokenizer.from_str(reference.backend_tokenizer.to_str())
    exact.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return exact


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of a GGUF file that has a tokenizer and just enough of a model."""

    def write(tokenizer: Mapping[str, Any], arch: str = "llama", name: str = "t.gguf") -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in (
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 32),
        ):
            writer.add_uint32(f"{arch}.{key}", value)
        writer.add_uint32(f"{arch}.attention.head_count", 2)
        writer.add_uint32(f"{arch}.attention.head_count_kv", 2)
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
        for key, value in tokenizer.items():
            full = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
            if isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            elif isinstance(value, str):
                writer.add_string(full, value)
            else:
                writer.add_array(full, value)
        writer.add_tensor("token_embd.weight", np.zeros((len(tokenizer.get("tokens", "x")), 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def trained(vocab_size: int, *, byte_level: bool) -> tuple[list[str], list[str]]:
    """Train a small BPE; return its tokens in the order of ids, and its merges as GGUF writes them."""
    backend = tokenizers.Tokenizer(models.BPE())
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first")
        alphabet = []
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    import json

    state = json.loads(backend.to_str())["model"]
    tokens = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    return tokens, [" ".join(pair) for pair in state["merges"]]


@pytest.fixture(scope="session")
def byte_level_parts() -> tuple[list[str], list[str]]:
    return trained(420, byte_level=True)


@pytest.fixture(scope="session")
def sentencepiece_parts() -> dict[str, Any]:
    """A llama-style vocabulary: specials, 256 byte tokens, then pieces whose scores fall."""
    pieces, _ = trained(300, byte_level=False)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(position) for position in range(len(pieces))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {
        "model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip


@pytest.fixture
def sentencepiece(write_gguf: Callable[..., Path], sentencepiece_parts: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(resolve_model(ModelConfig(model=str(write_gguf(sentencepiece_parts)))))


@pytest.fixture
def save_directory(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of tokenizer.json and side files."""
    import json

    def save(backend: tokenizers.Tokenizer, name: str = "tok", **files: Any) -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        backend.save(str(path / "tokenizer.json"))
        for stem, content in files.items():
            (path / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
        return path

    return save


@pytest.fixture
def byte_level_backend(byte_level_parts: tuple[list[str], list[str]]) -> tokenizers.Tokenizer:
    tokens, merges = byte_level_parts
    vocab = {token: position for position, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[tuple(line.split(" ")) for line in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend

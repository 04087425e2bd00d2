"""Loads a tokenizer from the files of a Hugging Face directory: tokenizer.json and what adds to it.

Must not run code of the model and must not read a sentencepiece model: a directory without tokenizer.json is refused
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headrace.base.errors import ModelSourceError
from headrace.text.tokenizer import Tokenizer
from headrace.weights.source import read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_directory(path: Path, *, eos_ids: Sequence[int], chat_template: str | None) -> Tokenizer:
    """Load ``tokenizer.json`` and apply what the other tokenizer files of the directory add.

    Args:
        path: the directory.
        eos_ids: ids that end the output, besides the tokenizer's own.
        chat_template: Jinja source.

    Raises:
        ModelSourceError: a file is missing or broken.
        UnsupportedModelError: a decoder that is not implemented.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelSourceError(f"{path}: there is no tokenizer.json in it", param="tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelSourceError(f"{file}: is not a tokenizer: {error}", param="tokenizer") from error
    config = _optional_json(path / "tokenizer_config.json")
    special = _special_tokens({**_optional_json(path / "special_tokens_map.json"), **config})
    _add_tokens(backend, path, config, special)
    if "add_bos_token" in config or "add_eos_token" in config:
        set_sequence_ends(
            backend, special, add_bos=bool(config.get("add_bos_token")), add_eos=bool(config.get("add_eos_token"))
        )
    return Tokenizer(backend, special_tokens=special, eos_ids=eos_ids, chat_template=chat_template)


def set_sequence_ends(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], *, add_bos: bool, add_eos: bool
) -> None:
    """Make the tokenizer add BOS at the beginning and EOS at the end of a text, or not.

    A flag without its token has no effect.
    """
    bos, eos = special.get("bos_token"), special.get("eos_token")
    bos_id = backend.token_to_id(bos) if add_bos and bos is not None else None
    eos_id = backend.token_to_id(eos) if add_eos and eos is not None else None
    template = ([f"{bos}:0"] if bos_id is not None else []) + ["$A:0"] + ([f"{eos}:0"] if eos_id is not None else [])
    named = [(str(bos), bos_id)] if bos_id is not None else []
    if eos_id is not None and eos_id != bos_id:
        named.append((str(eos), eos_id))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=named
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer, path: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Add tokens that the side files know and tokenizer.json does not, in the order of their ids."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed: dict[int, tokenizers.AddedToken] = {}
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        listed[int(key)] = _added_token(entry)
    for content, token_id in _optional_json(path / "added_tokens.json").items():
        listed.setdefault(int(token_id), tokenizers.AddedToken(content, normalized=False, special=False))
    for token_id, token in sorted(listed.items()):
        if token.content in known and known[token.content].special == token.special:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ModelSourceError(
                f"{path}: the added token {token.content!r} should have id {token_id}, but tokenizer.json gives it "
                f"{backend.token_to_id(token.content)}",
                param="tokenizer",
            )
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    contents = [*special.values(), *(_content(item) for item in (extra if isinstance(extra, list) else extra.values()))]
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in contents if text is not None and not (text in known and known[text].special)]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        str(entry.get("content", "")),
        single_word=bool(entry.get("single_word", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        normalized=bool(entry.get("normalized", False)),
        special=bool(entry.get("special", False)),
    )

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from headrace.base.errors import ModelSourceError, UnsupportedModelError
from headrace.text.token_bytes import byte_alphabet, spelling_of_decoder
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.text.tokenizer_directory import tokenizer_from_directory
from headrace.weights.source import ModelFiles


def load(path: Path, **facts: Any) -> Tokenizer:
    return load_tokenizer(
        ModelFiles(name="m", config=facts.pop("config", {}), kind="safetensors", tokenizer_dir=path, **facts)
    )


def test_saved_smollm_equals_the_one_from_gguf(smollm: Tokenizer, reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    mine = load(tmp_path)
    for text in ("The quick brown fox. 中文 😀\n", "<|im_start|>user\nhi<|im_end|>"):
        assert mine.encode(text) == smollm.encode(text) == reference.encode(text)
    assert mine.special_ids == smollm.special_ids
    assert (mine.bos_id, mine.eos_ids) == (1, (2,))
    assert mine.special_tokens == smollm.special_tokens


def test_tokens_of_the_side_files_are_added(
    byte_level_backend: tokenizers.Tokenizer, save_directory: Callable[..., Path]
) -> None:
    size = byte_level_backend.get_vocab_size()
    decoder = {
        str(size): {"content": "<think>", "special": False},
        str(size + 1): {"content": "<|x|>", "special": True},
    }
    path = save_directory(
        byte_level_backend,
        tokenizer_config={"added_tokens_decoder": decoder, "bos_token": {"content": "<bos>"}, "eos_token": "<|x|>"},
        added_tokens={"<think>": size, "<late>": size + 2},
        special_tokens_map={"pad_token": "<pad>"},
    )
    tokenizer = load(path)
    assert (
        tokenizer.encode("a<think>b<late><|x|>")[1::2] == [size, size + 2] or tokenizer.token_id("<late>") == size + 2
    )
    assert tokenizer.token_id("<think>") == size
    assert {tokenizer.token_text(token) for token in tokenizer.special_ids} == {"<|x|>", "<bos>", "<pad>"}
    assert tokenizer.decode(tokenizer.encode("a<think>b<|x|>")) == "a<think>b"
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<|x|>", "pad_token": "<pad>"}


def test_an_added_token_with_another_id_is_refused(
    byte_level_backend: tokenizers.Tokenizer, save_directory: Callable[..., Path]
) -> None:
    path = save_directory(byte_level_backend, tokenizer_config={"added_tokens_decoder": {"9999": {"content": "<x>"}}})
    with pytest.raises(ModelSourceError, match=r"'<x>' should have id 9999"):
        load(path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (True, False)),  # what tokenizer.json says
        ({"add_bos_token": False}, (False, False)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ({"add_eos_token": True}, (False, True)),
    ],
)
def test_flags_override_the_post_processor(
    byte_level_backend: tokenizers.Tokenizer,
    save_directory: Callable[..., Path],
    config: dict[str, bool],
    expected: tuple[bool, bool],
) -> None:
    byte_level_backend.add_special_tokens(["<b>", "<e>"])
    begin, end = byte_level_backend.token_to_id("<b>"), byte_level_backend.token_to_id("<e>")
    byte_level_backend.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", begin)])
    path = save_directory(byte_level_backend, tokenizer_config={"bos_token": "<b>", "eos_token": "<e>", **config})
    ids = load(path).encode("the")
    assert (ids[0] == begin, ids[-1] == end) == expected


def test_truncation_and_padding_of_the_file_are_switched_off(
    byte_level_backend: tokenizers.Tokenizer, save_directory: Callable[..., Path]
) -> None:
    byte_level_backend.enable_truncation(4)
    byte_level_backend.enable_padding(length=16)
    assert len(load(save_directory(byte_level_backend)).encode("x" * 40)) == 40


def test_end_ids_come_from_the_generation_config_then_the_config(
    byte_level_backend: tokenizers.Tokenizer, save_directory: Callable[..., Path]
) -> None:
    byte_level_backend.add_special_tokens(["<e>"])
    path = save_directory(byte_level_backend, tokenizer_config={"eos_token": "<e>"})
    own = byte_level_backend.token_to_id("<e>")
    assert load(path).eos_ids == (own,)
    assert load(path, config={"eos_token_id": 7}).eos_ids == (own, 7)
    assert load(path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [own, 8]}).eos_ids == (own, 8)


def test_without_a_tokenizer_the_message_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="--tokenizer"):
        load_tokenizer(ModelFiles(name="m", config={}, kind="dummy"))
    with pytest.raises(ModelSourceError, match=r"no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelSourceError, match="is not a tokenizer"):
        load(tmp_path)


def test_words_without_a_decoder_are_joined_by_spaces(save_directory: Callable[..., Path]) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load(save_directory(backend))
    assert tokenizer.decode(tokenizer.encode("a b a")) == backend.decode([0, 1, 0]) == "a b a"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(replacement="\u2581", prepend_scheme="first"),
        decoders.Metaspace(replacement="\u2581", prepend_scheme="never"),
    ],
)
def test_sentencepiece_decoders_equal_the_library(decoder: Any) -> None:
    vocab = {
        token: position
        for position, token in enumerate(["\u2581a", "b", "\u2581\u2581", "<0xC3>", "<0xA9>", "<0x41>", "\u2581"])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, special_tokens={})
    # The library's Metaspace drops every space of the first token, ours one; so the first token has at most one here.
    lists = [[0], [1, 0], [0, 3, 4], [3, 4, 0], [6, 0, 1], [5], [6], [6, 6, 1]]
    for ids in lists if isinstance(decoder, decoders.Metaspace) else [*lists, [2, 0]]:
        if isinstance(decoder, decoders.Metaspace) and any(3 <= token <= 5 for token in ids):
            continue  # no byte fallback there
        assert tokenizer.decode(ids) == backend.decode(ids), ids


def test_unknown_decoders_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'WordPiece'"):
        spelling_of_decoder(json.loads(decoders.WordPiece().__getstate__()))


def test_the_byte_alphabet_equals_the_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert (byte_alphabet()["Ġ"], byte_alphabet()["Ċ"], byte_alphabet()["A"]) == (32, 10, 65)


def test_an_added_token_stands_for_its_own_text(byte_level_backend: tokenizers.Tokenizer) -> None:
    byte_level_backend.add_tokens(["é Ġ"])
    tokenizer = Tokenizer(byte_level_backend, special_tokens={})
    assert tokenizer.decode(tokenizer.encode("xé Ġy")) == "xé Ġy"


def test_a_broken_side_file_is_named(
    byte_level_backend: tokenizers.Tokenizer, save_directory: Callable[..., Path]
) -> None:
    path = save_directory(byte_level_backend)
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelSourceError, match=r"tokenizer_config\.json"):
        tokenizer_from_directory(path, eos_ids=[], chat_template=None)

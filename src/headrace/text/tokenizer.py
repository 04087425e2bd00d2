"""The tokenizer: text to token ids and back, on the `tokenizers` library alone.

Special tokens inside a text become their ids, as in Hugging Face tokenizers. Must not import torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from headrace.base.errors import ModelSourceError, RequestError
from headrace.text.token_bytes import TokenSpelling, spelling_of_decoder
from headrace.weights.gguf_file import GgufFile
from headrace.weights.source import ModelFiles


class Tokenizer:
    """Text to tokens and back.

    Attributes:
        vocab_tokens: number of ids, added tokens included.
        bos_id: id that begins a sequence, or None.
        eos_ids: ids that end the output.
        special_ids: ids that carry no text.
        special_tokens: name (``bos_token`` ...) -> text, for chat templates.
        chat_template: Jinja source, or None.
        strips_first_space: one space at the very beginning of a text is not part of it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        spelling: TokenSpelling | None = None,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        Args:
            backend: taken over; truncation and padding are switched off.
            special_tokens: name -> text.
            eos_ids: ids that end the output, besides ``eos_token``.
            chat_template: Jinja source.
            spelling: how tokens are spelled; read off the decoder if not given.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling or spelling_of_decoder(_decoder_json(backend))
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self.vocab_tokens: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = dict(special_tokens)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id = self._named_id("bos_token")
        own_eos = self._named_id("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*([] if own_eos is None else [own_eos]), *eos_ids]))
        self.chat_template = chat_template
        self.strips_first_space = self._spelling.strip_first_space

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any text; special tokens in it become their ids.
            add_special_tokens: add what the model wants at the beginning and end (BOS, EOS).

        Raises:
            RequestError: the text has a lone surrogate, which is not a character.
        """
        try:
            # The batch call lets other threads run meanwhile, and is faster as it keeps no offsets.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:  # the library calls such a text "not a str"
            raise RequestError(_surrogate_message(text)) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD; unknown ids have no text."""
        data = b"".join(self.token_bytes(token_id) for token_id in self.visible(ids, skip_special_tokens))
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterable[int]:
        """Return the ids that have text: all, or all but the special ones."""
        if not skip_special_tokens:
            return ids
        special = self.special_ids
        return (token_id for token_id in ids if token_id not in special)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id that does not exist. Added tokens stand for their own text."""
        data = self._bytes.get(token_id)
        if data is None:
            added = self._added.get(token_id)
            if added is not None:
                data = added.encode("utf-8")
            else:
                token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
                data = b"" if token is None else self._spelling.to_bytes(token)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; bytes that are a part of a character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model, from ``tokenizer.json`` or from the metadata of a GGUF file.

    Raises:
        ModelSourceError: the model has none, or it cannot be read.
        UnsupportedModelError: a kind that is not implemented.
    """
    from headrace.text.tokenizer_directory import tokenizer_from_directory
    from headrace.text.tokenizer_gguf import tokenizer_from_gguf

    eos_ids = _eos_ids(files)
    if files.tokenizer_dir is not None:
        return tokenizer_from_directory(files.tokenizer_dir, eos_ids=eos_ids, chat_template=files.chat_template)
    if files.gguf_path is not None:
        return tokenizer_from_gguf(GgufFile(files.gguf_path), eos_ids=eos_ids, chat_template=files.chat_template)
    raise ModelSourceError(
        f"{files.name}: has no tokenizer.json; name a directory or hub model with one (--tokenizer)", param="tokenizer"
    )


def _eos_ids(files: ModelFiles) -> list[int]:
    """Return the ids that end an output: generation_config.json has the last word over config.json."""
    value: Any = files.generation_config.get("eos_token_id")
    if value is None:
        value = files.config.get("eos_token_id")
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _surrogate_message(text: str) -> str:
    at = next((position for position, character in enumerate(text) if "\ud800" <= character <= "\udfff"), -1)
    return (
        f"the text is not valid Unicode: a lone surrogate at position {at}" if at >= 0 else "the text is not a string"
    )


def _decoder_json(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    decoder = backend.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state

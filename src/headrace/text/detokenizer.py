"""Text of a growing output, token by token.

Keeps at most the bytes of one unfinished character, so each token costs constant time. The concatenation of all pieces
is the text of the whole output in its context; whole decoding goes through here too. Must not know stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from headrace.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Turns output tokens into text as they come."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        """Start after a prompt.

        Args:
            tokenizer: whose ids are pushed.
            prompt_ids: context of the output: a prompt with text in it keeps the space that the first output token
                begins with, and a prompt that ends inside a character is completed by the output.
            skip_special_tokens: special tokens have no text.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        context = self._last_bytes(prompt_ids)
        self._decoder.decode(context)
        self._strip_space = tokenizer.strips_first_space and not context

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Return at least the bytes of the prompt's last character; empty if the prompt has no text."""
        data = b""
        for position in range(len(prompt_ids) - 1, -1, -1):
            if self._skip_special_tokens and prompt_ids[position] in self._tokenizer.special_ids:
                continue
            data = self._tokenizer.token_bytes(prompt_ids[position]) + data
            if len(data) >= _LONGEST_CHARACTER_BYTES:
                break
        return data

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; bytes of an unfinished character wait for the next call."""
        data = b"".join(
            self._tokenizer.token_bytes(token_id)
            for token_id in self._tokenizer.visible(ids, self._skip_special_tokens)
        )
        return self._strip(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what is left: U+FFFD for the bytes of an unfinished character, else nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

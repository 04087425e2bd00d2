"""Which bytes a token stands for, read off the tokenizer's decoder.

Text is defined as the bytes of the visible tokens, one after the other, read as UTF-8 with U+FFFD for what is not.
That makes streamed and whole decoding one function. Must not know ids: it maps the spelling of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.base.errors import UnsupportedModelError

SPM_SPACE = "\u2581"


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table, spelling of a byte -> byte.

    Printable Latin-1 characters spell themselves; the other 68 bytes are spelled by U+0100 and following, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return table


@dataclass(frozen=True)
class TokenSpelling:
    """How ordinary tokens are spelled in a vocabulary.

    Attributes:
        byte_level: each character spells one byte, GPT-2's way.
        space: character that stands for a space, or empty.
        byte_fallback: tokens such as ``<0x0A>`` are single bytes.
        joined_by_space: tokens are words with a space between them.
        strip_first_space: one space at the very beginning of a text is not part of it.
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    joined_by_space: bool = False
    strip_first_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of an ordinary (not added) token."""
        if self.byte_level:
            table = byte_alphabet()
            try:
                return bytes([table[character] for character in token])
            except KeyError:
                return token.encode("utf-8")
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode("utf-8")
        if self.space:
            token = token.replace(self.space, " ")
        return (" " + token if self.joined_by_space else token).encode("utf-8")


BYTE_LEVEL = TokenSpelling(byte_level=True)


def spelling_of_decoder(decoder: dict[str, Any] | None) -> TokenSpelling:
    """Recognise a decoder of the `tokenizers` library.

    Args:
        decoder: its JSON, or None if the tokenizer has none (then words are joined by spaces).

    Raises:
        UnsupportedModelError: a kind that is not implemented.
    """
    if decoder is None:
        return TokenSpelling(joined_by_space=True, strip_first_space=True)
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    if any(part.get("type") == "ByteLevel" for part in parts):
        return BYTE_LEVEL
    space, fallback, strip = "", False, False
    for part in parts:
        kind = part.get("type")
        if kind == "Replace" and part.get("content") == " ":
            space = str(part.get("pattern", {}).get("String", ""))
        elif kind == "Metaspace":
            space, strip = str(part.get("replacement", SPM_SPACE)), part.get("prepend_scheme", "always") != "never"
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Strip" and part.get("content") == " " and part.get("start") == 1 and not part.get("stop"):
            strip = True
        elif kind != "Fuse":
            raise UnsupportedModelError(f"the tokenizer's decoder {kind!r} is not supported", param="tokenizer")
    return TokenSpelling(space=space, byte_fallback=fallback, strip_first_space=strip)

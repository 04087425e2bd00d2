"""Token ids as arrays of four bytes each, and how they cross a process boundary.

A list of 100,000 token ids takes four megabytes of objects that the garbage collector walks through, and a millisecond
or more to copy, check or encode; an array takes 400 kB and a few microseconds. Must not know messages.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.base.errors import ProtocolError

TOKEN_BYTES = 4
_CODE = "I"
_SWAPPED = sys.byteorder != "little"


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Return token ids as an array.

    Raises:
        OverflowError: one is below 0 or takes more than four bytes.
        TypeError: one is no integer.
    """
    return array(_CODE, token_ids)


def encode_tokens(value: Any) -> bytes:
    """Return the wire form of an array of token ids, little-endian; the ``enc_hook`` of encoders.

    Raises:
        NotImplementedError: the value is something else.
    """
    if not isinstance(value, array):
        raise NotImplementedError(f"{type(value).__name__} has no wire form")
    if _SWAPPED:
        value = value[:]
        value.byteswap()
    data: bytes = value.tobytes()
    return data


def decode_tokens(value: Sequence[int] | bytes) -> Sequence[int]:
    """Return token ids as they came over the wire: bytes of an array, or a list, which stays one.

    Raises:
        ProtocolError: bytes that are no whole number of token ids.
    """
    if not isinstance(value, bytes):
        return value
    if len(value) % TOKEN_BYTES:
        raise ProtocolError(f"{len(value)} bytes are no whole number of token ids")
    tokens = array(_CODE)
    tokens.frombytes(value)
    if _SWAPPED:
        tokens.byteswap()
    return tokens

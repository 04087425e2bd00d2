"""The hash chain over token blocks: the one implementation, for the cache, its events and the front end.

Equal inputs give equal bytes in every process and on every machine. Must not know memory, requests or sampling.

The hash of block i is ``BLAKE3(hash of block i-1 | token ids, 4 bytes each | extra keys)``, so it stands for the whole
prefix that ends with the block. The chain begins at a fixed root. Each extra key carries its kind and its length:
no value of one kind can pass for a value of another.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Sequence

from blake3 import blake3

HASH_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1
"""Largest token id that the chain can encode."""

_ROOT: bytes = blake3(b"headrace prefix chain, version 1").digest()


class ExtraKind(enum.IntEnum):
    """What an extra key is. Numbers are part of the hash: never change or reuse one."""

    SALT = 1


@functools.cache
def _packer(block_tokens: int) -> struct.Struct:
    return struct.Struct(f"<{block_tokens}I")


def _extra_key(kind: ExtraKind, payload: bytes) -> bytes:
    return bytes([kind]) + len(payload).to_bytes(4, "little") + payload


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_tokens: int, *, salt: str | None = None
) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` does not have yet.

    The work is proportional to the new blocks only.

    Args:
        hashes: chain of the first ``len(hashes)`` blocks of the same tokens; grown in place.
        token_ids: all tokens from position 0, each in [0, `MAX_TOKEN_ID`].
        block_tokens: tokens under one hash.
        salt: separates tenants; part of the first block's hash, and through the chain of all later ones.

    Mutates: ``hashes``.
    """
    missing = range(len(hashes), len(token_ids) // block_tokens)
    if not missing:
        return
    packer = _packer(block_tokens)
    parent = hashes[-1] if hashes else _ROOT
    for index in missing:
        content = parent + packer.pack(*token_ids[index * block_tokens : (index + 1) * block_tokens])
        if index == 0 and salt is not None:
            content += _extra_key(ExtraKind.SALT, salt.encode())
        parent = blake3(content).digest()
        hashes.append(parent)


def block_hashes(
    token_ids: Sequence[int], block_tokens: int, *, salt: str | None = None, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the hashes of all full blocks of a token sequence.

    Args:
        token_ids: all tokens from position 0, each in [0, `MAX_TOKEN_ID`].
        block_tokens: tokens under one hash.
        salt: separates tenants (first block only).
        known: hashes of the first blocks, if they were computed before.

    Returns:
        ``len(token_ids) // block_tokens`` hashes of `HASH_BYTES` bytes; a last partial block has none.
    """
    hashes = list(known[: len(token_ids) // block_tokens])
    extend_block_hashes(hashes, token_ids, block_tokens, salt=salt)
    return hashes

"""The hash chain over units of tokens: the one implementation, for the cache, its events, tiers and the front end.

Equal inputs give equal bytes in every process and on every machine. Must not know memory, groups or sampling.

The hash of unit i is ``BLAKE3(hash of unit i-1 | token ids, 4 bytes each | extra keys)``, so it stands for the whole
prefix that ends with the unit. The chain begins at a root, fixed unless a seed is given. Token ids alone do not say
what was computed: an adapter, an image or given embeddings change the KV, and a salt keeps tenants apart. Such an
extra key carries its kind and its length: no value of one kind can pass for a value of another, or for tokens.
"""

from __future__ import annotations

import bisect
import enum
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from blake3 import blake3

from headrace.types.requests import EmbedsSpan, EngineRequest, MediaSpan
from headrace.types.token_ids import TOKEN_BYTES, encode_tokens, token_array

HASH_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1
"""Largest token id that the chain can encode."""

_CHAIN = b"headrace prefix chain, version 1"
ROOT: bytes = blake3(_CHAIN).digest()
"""Start of a chain without a seed."""


class ExtraKind(enum.IntEnum):
    """What an extra key is. Numbers are part of the hash: never change or reuse one."""

    SALT = 1
    ADAPTER = 2
    MEDIA = 3
    EMBEDS = 4
    ENCODER = 5
    SEED = 6


class ExtraKey(msgspec.Struct, frozen=True, array_like=True):
    """One extra key of one unit.

    Attributes:
        kind: number of an `ExtraKind`.
        value: salt or identifier in UTF-8, or a digest.
        offset_tokens: where the span begins, counted from the unit's first token; negative if it began in an earlier
            unit. 0 for kinds without a position.
    """

    kind: int
    value: bytes
    offset_tokens: int = 0

    def encoded(self) -> bytes:
        """Return the bytes that enter the hash."""
        value = self.value
        if self.kind in _PLACED:
            value = self.offset_tokens.to_bytes(8, "little", signed=True) + value
        return bytes([self.kind]) + len(value).to_bytes(4, "little") + value


_PLACED = frozenset({ExtraKind.MEDIA, ExtraKind.EMBEDS})


class _Span(NamedTuple):
    start: int
    tokens: int
    kind: ExtraKind
    value: bytes

    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class HashExtras:
    """What changes the KV of a sequence beside its token ids, or keeps it apart.

    Attributes:
        salt: separates tenants; in the first unit, and through the chain in all later ones.
        adapter: digest of the adapter's content (never its name), as the salt.
        media: spans that encoder outputs fill, ascending. A span of no tokens feeds cross attention: the whole
            sequence depends on it, so it goes into the first unit.
        embeds: spans with embeddings of their own, ascending.
    """

    salt: str | None = None
    adapter: bytes | None = None
    media: tuple[MediaSpan, ...] = ()
    embeds: tuple[EmbedsSpan, ...] = ()

    @functools.cached_property
    def head(self) -> tuple[ExtraKey, ...]:
        """Keys without a position, which belong to the first unit."""
        keys: list[ExtraKey] = []
        if self.salt is not None:
            keys.append(ExtraKey(ExtraKind.SALT, self.salt.encode()))
        if self.adapter is not None:
            keys.append(ExtraKey(ExtraKind.ADAPTER, self.adapter))
        keys.extend(ExtraKey(ExtraKind.ENCODER, span.identifier.encode()) for span in self.media if not span.tokens)
        return tuple(keys)

    @functools.cached_property
    def spans(self) -> tuple[tuple[_Span, ...], ...]:
        """The spans that take positions: those of each kind for itself, because kinds may overlap."""
        media = [(span.start, span.tokens, ExtraKind.MEDIA, span.identifier.encode()) for span in self.media]
        embeds = [(span.start, span.tokens, ExtraKind.EMBEDS, span.digest) for span in self.embeds]
        placed = (tuple(_Span(*fields) for fields in kind if fields[1]) for kind in (media, embeds))
        return tuple(spans for spans in placed if spans)


NO_EXTRAS = HashExtras()


def extras_of(request: EngineRequest) -> HashExtras:
    """Return what a request brings into its hashes."""
    if request.cache_salt is None and request.adapter is None and not request.media and not request.embeds:
        return NO_EXTRAS
    return HashExtras(
        salt=request.cache_salt,
        adapter=request.adapter,
        media=tuple(request.media),
        embeds=tuple(request.embeds),
    )


@functools.lru_cache(maxsize=16)
def root_of(seed: str) -> bytes:
    """Return the start of the chain for a seed: processes with one seed share hashes, others never meet.

    Args:
        seed: any text; empty for the fixed `ROOT`.
    """
    if not seed:
        return ROOT
    return blake3(_CHAIN + ExtraKey(ExtraKind.SEED, seed.encode()).encoded()).digest()


def unit_extras(extras: HashExtras, unit: int, hash_tokens: int) -> list[ExtraKey]:
    """Return the extra keys of one unit, in the order in which they are hashed.

    Args:
        extras: of the sequence.
        unit: index of the unit.
        hash_tokens: tokens in a unit.
    """
    keys = list(extras.head) if not unit else []
    first, end = unit * hash_tokens, (unit + 1) * hash_tokens
    for spans in extras.spans:
        for index in range(bisect.bisect_right(spans, first, key=_Span.end), len(spans)):
            span = spans[index]
            if span.start >= end:
                break
            keys.append(ExtraKey(span.kind, span.value, span.start - first))
    return keys


def _packed(token_ids: Sequence[int], start: int, end: int) -> bytes:
    """Return some token ids as bytes, four each, little-endian; one out of range is an `OverflowError`."""
    part = token_ids[start:end]
    return encode_tokens(part if isinstance(part, array) else token_array(part))


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    hash_tokens: int,
    *,
    extras: HashExtras = NO_EXTRAS,
    root: bytes = ROOT,
) -> None:
    """Append the hashes of the complete units of ``token_ids`` that ``hashes`` does not have yet.

    The work is proportional to the new units only.

    Args:
        hashes: chain of the first ``len(hashes)`` units of the same tokens; grown in place.
        token_ids: all tokens from position 0, each in [0, `MAX_TOKEN_ID`].
        hash_tokens: tokens under one hash.
        extras: what else the KV depends on.
        root: start of the chain, see `root_of`.

    Mutates: ``hashes``.
    """
    missing = range(len(hashes), len(token_ids) // hash_tokens)
    if not missing:
        return
    packed, has_spans = _packed(token_ids, missing.start * hash_tokens, missing.stop * hash_tokens), bool(extras.spans)
    parent = hashes[-1] if hashes else root
    size = hash_tokens * TOKEN_BYTES
    for place, unit in enumerate(missing):
        content = parent + packed[place * size : (place + 1) * size]
        if has_spans or not unit:
            content += b"".join(key.encoded() for key in unit_extras(extras, unit, hash_tokens))
        parent = blake3(content).digest()
        hashes.append(parent)


def block_hashes(
    token_ids: Sequence[int],
    hash_tokens: int,
    *,
    extras: HashExtras = NO_EXTRAS,
    root: bytes = ROOT,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the hashes of all complete units of a token sequence.

    Args:
        token_ids: all tokens from position 0, each in [0, `MAX_TOKEN_ID`].
        hash_tokens: tokens under one hash.
        extras: what else the KV depends on.
        root: start of the chain, see `root_of`.
        known: hashes of the first units, if they were computed before.

    Returns:
        ``len(token_ids) // hash_tokens`` hashes of `HASH_BYTES` bytes; a last incomplete unit has none.
    """
    hashes = list(known[: len(token_ids) // hash_tokens])
    extend_block_hashes(hashes, token_ids, hash_tokens, extras=extras, root=root)
    return hashes

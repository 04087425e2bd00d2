"""Chooses the granule, the extent and the pieces of groups with blocks of very different size, so that least is lost.

What a memory loses that several groups share: padding of blocks to granules, the end of an extent that holds no whole
block, and blocks that are free in an extent which another group wants. The last is about an extent a sequence, so
extents must be small beside a sequence; and an extent holds the largest block. Hence a block of many layers, above all
a recurrent state, may be kept in several pieces, each of some layers and a group of its own.

Arithmetic only. Must not know specs, nor how much memory there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.base.errors import InvariantError

ALIGN_BYTES = 256
"""A granule is a multiple of it: a strided view of any element type begins on an element, and loads stay aligned."""

_MOST_PIECES = 16
_FEW_PIECES = 3
"""So many pieces may differ in size; more are as equal as can be."""
_EXTENT_WEIGHT = 0.3
"""Share of memory that is lost if an extent is as large as a usual sequence (measured: docs/decisions.md) ..."""
_KIND_EXTENT_WEIGHT = 0.1
"""... and for each kind that grows: each has extents that are partly free."""
_STATE_WEIGHT = 0.001
"""What one more recurrent group costs in bookkeeping, as a share of memory: its table has one block for good."""
_ATTENTION_WEIGHT = 0.012
"""The same for a group whose tables grow."""
_LEND_WEIGHT = 0.02
"""The same if an extent holds a single block of a group that grows; half of it if two, and so on."""
_FINE_WEIGHT = 0.0003
"""The same for each halving of a granule below `_COARSE_BYTES`: copies then come in smaller units."""
_COARSE_BYTES = 64 << 10
_FINEST_BYTES = 4 << 10
"""No granule is finer unless a block is: the memory counts owners by granule."""


@dataclass(frozen=True)
class Kind:
    """Layers with equal specs, before they are divided into groups.

    Attributes:
        layers: how many.
        layer_bytes: one layer's part of a block.
        sequence_blocks: blocks that a usual sequence holds.
        grows: False for a recurrent state.
    """

    layers: int
    layer_bytes: int
    sequence_blocks: int
    grows: bool

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a usual sequence in all layers."""
        return self.layers * self.layer_bytes * self.sequence_blocks


@dataclass(frozen=True)
class Geometry:
    """How memory is cut.

    Attributes:
        granule_bytes: of a granule.
        extent_granules: granules of an extent.
        pieces: per kind, layers of each piece.
    """

    granule_bytes: int
    extent_granules: int
    pieces: list[list[int]]


def choose_geometry(kinds: Sequence[Kind]) -> Geometry:
    """Choose pieces, extent and granule for at least two kinds."""
    total = sum(kind.sequence_bytes for kind in kinds)
    best_cost, best_pieces, best_extent = math.inf, [[kind.layers] for kind in kinds], 0
    stranded = _EXTENT_WEIGHT + _KIND_EXTENT_WEIGHT * sum(kind.grows for kind in kinds)
    for extent_bytes in _extent_candidates(kinds):
        cost = stranded * extent_bytes / total
        pieces: list[list[int]] = []
        for kind in kinds:
            if cost >= best_cost:
                break
            share = kind.sequence_bytes / total
            more, sizes = _divide(kind, extent_bytes, share)
            cost += more
            pieces.append(sizes)
        if cost < best_cost and len(pieces) == len(kinds):
            best_cost, best_pieces, best_extent = cost, pieces, extent_bytes
    granule_bytes, extent_granules = _choose_granule(kinds, best_pieces, best_extent)
    return Geometry(granule_bytes, extent_granules, best_pieces)


def _extent_candidates(kinds: Sequence[Kind]) -> list[int]:
    """Return sizes that end with a whole piece of some kind, ascending; each holds one layer of every kind."""
    least = max(kind.layer_bytes for kind in kinds)
    found: set[int] = set()
    for kind in kinds:
        for pieces in range(1, min(_MOST_PIECES, kind.layers) + 1):
            piece_bytes = -(-kind.layers // pieces) * kind.layer_bytes
            first = -(-least // piece_bytes)
            found.update(piece_bytes * count for count in range(first, first + 8))
    largest = max(kind.layers * kind.layer_bytes for kind in kinds)
    return sorted(size for size in found if size <= 4 * largest)


def _divide(kind: Kind, extent_bytes: int, share: float) -> tuple[float, list[int]]:
    """Divide the layers of a kind into pieces.

    Returns:
        The cost as a share of memory; layers of each piece. The cost is infinite if no division fits.
    """
    weight = _ATTENTION_WEIGHT if kind.grows else _STATE_WEIGHT
    fitting = extent_bytes // kind.layer_bytes
    lost = [1.0] + [
        1 - fitting // size * size * kind.layer_bytes / extent_bytes for size in range(1, min(kind.layers, fitting) + 1)
    ]
    best_cost, best = math.inf, [kind.layers]
    for sizes in _divisions(kind.layers, fitting):
        cost = weight * len(sizes) + share * sum(lost[size] * size for size in sizes) / kind.layers
        if kind.grows:
            cost += share * _LEND_WEIGHT * max(sizes) / fitting
        if cost < best_cost:
            best_cost, best = cost, sizes
    return best_cost, best


def _divisions(layers: int, most: int) -> Iterator[list[int]]:
    """Yield ways to divide layers into pieces of at most ``most``, few and large ones first."""
    for pieces in range(max(1, -(-layers // most)), min(layers, _MOST_PIECES) + 1):
        yield [layers // pieces + (place < layers % pieces) for place in range(pieces)]
    if layers >= 2:
        yield from ([first, layers - first] for first in range(-(-layers // 2), min(most, layers - 1) + 1))
    if layers >= _FEW_PIECES:
        for first in range(-(-layers // 3), min(most, layers - 2) + 1):
            yield from (
                [first, second, layers - first - second]
                for second in range(-(-(layers - first) // 2), min(first, layers - first - 1) + 1)
            )


def _choose_granule(kinds: Sequence[Kind], pieces: Sequence[Sequence[int]], extent_bytes: int) -> tuple[int, int]:
    """Return (bytes of a granule, granules of an extent of about ``extent_bytes``)."""
    total = sum(kind.sequence_bytes for kind in kinds)
    shares: dict[int, float] = {}
    for kind, sizes in zip(kinds, pieces, strict=True):
        for layers in sizes:
            block_bytes = layers * kind.layer_bytes
            shares[block_bytes] = shares.get(block_bytes, 0.0) + layers / kind.layers * kind.sequence_bytes / total
    best: tuple[float, int, int] | None = None
    for granule_bytes in _granule_candidates(shares):
        blocks = {size: -(-size // granule_bytes) for size in shares}
        fine = max(0.0, math.log2(_COARSE_BYTES / granule_bytes)) * _FINE_WEIGHT
        least = max(blocks.values())
        for extent in {max(least, extent_bytes // granule_bytes), max(least, -(-extent_bytes // granule_bytes))}:
            cost = fine + sum(
                share * (1 - extent // blocks[size] * size / (extent * granule_bytes)) for size, share in shares.items()
            )
            if best is None or cost < best[0]:
                best = (cost, granule_bytes, extent)
    if best is None:
        raise InvariantError(f"no granule was tried for blocks of {sorted(shares)} bytes")
    return best[1], best[2]


def _granule_candidates(shares: dict[int, float]) -> list[int]:
    """Return granules that divide some block nearly evenly."""
    least = max(ALIGN_BYTES, min(_FINEST_BYTES, *shares) // ALIGN_BYTES * ALIGN_BYTES)
    found = {least}
    for size in shares:
        found.update(max(least, -(-size // (parts * ALIGN_BYTES)) * ALIGN_BYTES) for parts in range(1, 129))
    return sorted(found, reverse=True)

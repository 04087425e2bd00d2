"""Chooses the granule and the extent for groups with blocks of very different size, so that least is lost.

Arithmetic only. Must not know how much memory there is beyond what bounds the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_BYTES = 256
"""A granule is a multiple of it: a strided view of any element type begins on an element, and loads stay aligned."""
_LARGEST_GRANULE_BYTES = 64 << 10
_EXTENT_GROWTH = 8


@dataclass(frozen=True)
class Geometry:
    """How memory is cut.

    Attributes:
        granule_bytes: of a granule.
        extent_granules: granules of an extent.
        block_granules: per group, granules of a block.
        lost_share: per group, share of an extent that its blocks do not use, by padding and at the end.
    """

    granule_bytes: int
    extent_granules: int
    block_granules: list[int]
    lost_share: list[float]


def choose_geometry(block_bytes: Sequence[int], weights: Sequence[float]) -> Geometry:
    """Choose granule and extent.

    Args:
        block_bytes: bytes of a block of each group, at least two.
        weights: share of the memory that each group takes in a usual load.
    """
    best: tuple[float, Geometry] | None = None
    total = sum(weights)
    for granule_bytes in _granule_candidates(block_bytes):
        sizes = [-(-size // granule_bytes) for size in block_bytes]
        largest = max(sizes)
        for extent in _extent_candidates(sizes, largest):
            lost = [
                1 - (extent // size) * used / (extent * granule_bytes)
                for size, used in zip(sizes, block_bytes, strict=True)
            ]
            mean = sum(share * weight for share, weight in zip(lost, weights, strict=True)) / total
            cost = mean + 0.005 * extent / largest
            if best is None or cost < best[0] - 1e-9:
                best = (cost, Geometry(granule_bytes, extent, sizes, lost))
    if best is None:
        raise ValueError("no geometry")
    return best[1]


def _granule_candidates(block_bytes: Sequence[int]) -> list[int]:
    """Return granules that divide some block nearly evenly, the coarse ones first."""
    found: set[int] = set()
    for size in block_bytes:
        for parts in range(1, 65):
            granule = -(-size // (parts * ALIGN_BYTES)) * ALIGN_BYTES
            if granule <= _LARGEST_GRANULE_BYTES or granule <= min(block_bytes):
                found.add(granule)
    return sorted(found, reverse=True)


def _extent_candidates(sizes: Sequence[int], largest: int) -> list[int]:
    """Return extents from the largest block up that end with a whole block of some group."""
    found: set[int] = {largest}
    for size in sizes:
        first = -(-largest // size)
        found.update(size * count for count in range(first, min(first * _EXTENT_GROWTH, first + 32) + 1))
    return sorted(found)

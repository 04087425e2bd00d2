"""How KV memory is divided: groups of layers, tokens a block, granules, extents; and how long a sequence it holds.

Arithmetic only. Must not ask a device: the bytes are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.base.errors import ConfigError, InsufficientMemoryError, invariant
from headrace.kv.geometry import Kind, choose_geometry
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    KvLayout,
    LatentSpec,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    kind_of,
)

_UNBOUNDED_TOKENS = 1 << 40
_NULL_BLOCKS = 1
_VIEW_BYTES = 16
"""Granules are multiples of it, so that a strided view of any element type begins on an element."""
_USUAL_TOKENS = 4096
"""Length of the sequence for which granule and extent are chosen."""
_MOST_TOKENS = 64
"""A block of attention holds no more tokens unless it is asked for or a compression ratio demands it."""
_SMALL = 4
"""A block is small if another group's is so many times larger."""


def group_need_blocks(
    group: GroupLayout, tokens: int, *, batch_tokens: int, in_flight: int, encoder_tokens: int = 0
) -> int:
    """Return the most blocks that one sequence ever holds at once in a group, while it grows to ``tokens`` tokens.

    Windows: what is applied lies at most ``in_flight`` steps behind what is planned, and blocks are freed from what is
    applied. A window need not begin on a block edge, so it can reach into one block more.

    Args:
        group: of the layout.
        tokens: length of the sequence.
        batch_tokens: most tokens that a step computes of it.
        in_flight: plans made before the first result is applied, at least 1.
        encoder_tokens: length of the encoder's output, for cross attention.
    """
    spec, block_tokens = group.spec, group.block_tokens
    if isinstance(spec, RecurrentSpec):
        return 1 if tokens else 0
    if isinstance(spec, CrossAttentionSpec):
        return -(-encoder_tokens // block_tokens)
    every = -(-tokens // block_tokens)
    if isinstance(spec, SlidingWindowSpec):
        span_tokens = spec.window_tokens - 1 + batch_tokens * in_flight
        return min(every, -(-span_tokens // block_tokens) + 1)
    if isinstance(spec, ChunkedLocalSpec):
        span_tokens = spec.chunk_tokens - 1 + batch_tokens * in_flight
        return min(every, -(-span_tokens // block_tokens) + (1 if spec.chunk_tokens % block_tokens else 0))
    return every


def fits(layout: KvLayout, need_blocks: Sequence[int]) -> bool:
    """Return whether an empty memory has so many blocks for each group at once.

    Args:
        layout: of the memory.
        need_blocks: per group.
    """
    if len(layout.groups) == 1:
        return need_blocks[0] < layout.groups[0].num_blocks
    extents = sum(
        -(-need // (layout.extent_granules // group.block_granules))
        for need, group in zip(need_blocks, layout.groups, strict=True)
    )
    return extents <= layout.num_extents


def capacity_tokens(
    layout: KvLayout, *, batch_tokens: int | None = None, in_flight: int = 1, encoder_tokens: int = 0
) -> int:
    """Return the length in tokens of the longest single sequence whose KV fits.

    Args:
        layout: of the memory.
        batch_tokens: most tokens that a step computes of a sequence; None: all of it, so that windows save nothing.
        in_flight: plans made before the first result is applied.
        encoder_tokens: length of the encoder's output, for cross attention.
    """

    def fit(tokens: int) -> bool:
        return fits(
            layout,
            [
                group_need_blocks(
                    group,
                    tokens,
                    batch_tokens=tokens if batch_tokens is None else batch_tokens,
                    in_flight=in_flight,
                    encoder_tokens=encoder_tokens,
                )
                for group in layout.groups
            ],
        )

    low, high = 0, _UNBOUNDED_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if fit(middle):
            low = middle
        else:
            high = middle - 1
    return low


def fixed_layout(
    layer_caches: Sequence[LayerCache], *, block_tokens: int | Sequence[int], usable_blocks: int | Sequence[int]
) -> KvLayout:
    """Return a layout with exact sizes, for tests and small programs: nothing is chosen.

    Args:
        layer_caches: what the model declares; equal specs form a group, in order of their first layer.
        block_tokens: of every group, or group by group (0 for a recurrent one).
        usable_blocks: blocks that every group can have while all others have theirs, or group by group.
    """
    members, shared = group_layers(layer_caches)
    sizes = [block_tokens] * len(members) if isinstance(block_tokens, int) else list(block_tokens)
    counts = [usable_blocks] * len(members) if isinstance(usable_blocks, int) else list(usable_blocks)
    if not members:
        return KvLayout([], _VIEW_BYTES, 0, 0, shared)
    padded = [
        _aligned(layers[0].spec.block_bytes(tokens) * len(layers))
        for layers, tokens in zip(members, sizes, strict=True)
    ]
    granule_bytes = math.gcd(*padded)
    cutting = _cutting(members, sizes, granule_bytes, max(padded) // granule_bytes, shared)
    return cutting.layout(cutting.extents_for(counts))


def make_layout(
    layer_caches: Sequence[LayerCache],
    *,
    block_tokens: int,
    bytes_available: int | None,
    num_blocks_override: int | None,
    max_model_len: int,
) -> KvLayout:
    """Divide memory into granules, extents and blocks.

    Args:
        layer_caches: what the model declares.
        block_tokens: tokens in a block of attention; a compressed group takes the next multiple of its ratio.
        bytes_available: memory for the KV cache of one rank; None if the number of blocks is given.
        num_blocks_override: blocks that every group can have while the others have theirs, in place of what fits.
        max_model_len: longest sequence in tokens, for the message of the error.

    Returns:
        The layout; ``num_blocks`` counts the null block too. Without any group it is empty.

    Raises:
        InsufficientMemoryError: not even one block a group fits, or the given number does not.
        ConfigError: declarations that contradict each other.
    """
    invariant(bytes_available is not None or num_blocks_override is not None, "neither bytes nor blocks are given")
    members, shared = group_layers(layer_caches)
    if not members:
        return KvLayout([], _VIEW_BYTES, 0, 0, shared)
    cutting = _choose(members, block_tokens, shared)
    extents = cutting.extents_for([num_blocks_override or 1] * len(cutting.groups))
    if bytes_available is not None:
        extent_bytes = cutting.extent_granules * cutting.granule_bytes
        usable_bytes = bytes_available - cutting.layout(0).null_granules * cutting.granule_bytes
        fitting = max(0, usable_bytes // extent_bytes)
        if fitting < extents:
            raise _too_little(cutting, bytes_available, extents, max_model_len)
        extents = fitting if num_blocks_override is None else extents
    return cutting.layout(extents)


def group_layers(layer_caches: Sequence[LayerCache]) -> tuple[list[list[LayerCache]], list[tuple[int, int]]]:
    """Collect layers with equal specs, and the layers that read another one's cache.

    Returns:
        The groups' members in order of their first layer, each ascending; pairs (layer, layer that it reads).

    Raises:
        ConfigError: a layer reads a cache that no layer keeps, or a part is declared twice.
    """
    members: dict[object, list[LayerCache]] = {}
    shared: list[tuple[int, int]] = []
    seen: set[tuple[int, str]] = set()
    for cache in sorted(layer_caches, key=lambda cache: (cache.layer_index, cache.part)):
        if (cache.layer_index, cache.part) in seen:
            raise ConfigError(f"layer {cache.layer_index} declares the cache part {cache.part!r} twice")
        seen.add((cache.layer_index, cache.part))
        if isinstance(cache.spec, SharedSpec):
            shared.append((cache.layer_index, cache.spec.source_layer))
        elif not isinstance(cache.spec, NoCacheSpec):
            members.setdefault(cache.spec, []).append(cache)
    keepers = {cache.layer_index for group in members.values() for cache in group}
    for layer, source in shared:
        if source not in keepers:
            raise ConfigError(f"layer {layer} reads the cache of layer {source}, which keeps none of its own")
    return list(members.values()), shared


@dataclass(frozen=True)
class _Cutting:
    """Groups whose ``num_blocks`` is not known yet, and the sizes of granules and extents.

    Attributes:
        groups: with ``block_granules``.
        granule_bytes: of a granule.
        extent_granules: of an extent; of one group alone a single block.
        shared: (layer, layer whose cache it reads).
    """

    groups: list[GroupLayout]
    granule_bytes: int
    extent_granules: int
    shared: list[tuple[int, int]]

    def extents_for(self, counts: Sequence[int]) -> int:
        """Return the extents in which every group has so many blocks at once."""
        return sum(
            -(-count // (self.extent_granules // group.block_granules))
            for count, group in zip(counts, self.groups, strict=True)
        )

    def layout(self, extents: int) -> KvLayout:
        """Return the layout with so many extents; one group alone has them as a single one, for good."""
        groups = [
            msgspec.structs.replace(
                group, num_blocks=_NULL_BLOCKS + extents * (self.extent_granules // group.block_granules)
            )
            for group in self.groups
        ]
        if len(groups) == 1:
            return KvLayout(groups, self.granule_bytes, self.extent_granules * extents, 1, self.shared)
        return KvLayout(groups, self.granule_bytes, self.extent_granules, extents, self.shared)


def _cutting(
    members: Sequence[Sequence[LayerCache]],
    sizes: Sequence[int],
    granule_bytes: int,
    extent_granules: int,
    shared: list[tuple[int, int]],
) -> _Cutting:
    groups = []
    for index, (layers, tokens) in enumerate(zip(members, sizes, strict=True)):
        spec = layers[0].spec
        parts = [layer.part for layer in layers]
        group = GroupLayout(
            group=index,
            spec=spec,
            layer_indices=[layer.layer_index for layer in layers],
            block_tokens=0 if isinstance(spec, RecurrentSpec) else tokens,
            num_blocks=_NULL_BLOCKS,
            parts=parts if any(part != "kv" for part in parts) else [],
        )
        granules = -(-group.block_bytes() // granule_bytes)
        groups.append(msgspec.structs.replace(group, block_granules=granules))
    return _Cutting(groups, granule_bytes, extent_granules, shared)


def _choose(members: Sequence[Sequence[LayerCache]], block_tokens: int, shared: list[tuple[int, int]]) -> _Cutting:
    """Choose the tokens of each group's blocks, the pieces of large blocks, granule and extent."""
    sizes = _sizes_tokens([(layers[0].spec, len(layers)) for layers in members], block_tokens)
    if len(members) == 1:
        # One group alone pads nothing and strands nothing.
        block_bytes = members[0][0].spec.block_bytes(sizes[0]) * len(members[0])
        return _cutting(members, sizes, _aligned(block_bytes), 1, shared)
    kinds = []
    for group in _cutting(members, sizes, 1, 1, []).groups:
        blocks = group_need_blocks(group, _USUAL_TOKENS, batch_tokens=1, in_flight=1, encoder_tokens=_USUAL_TOKENS)
        layers = len(group.layer_indices)
        kinds.append(Kind(layers, group.block_bytes() // layers, blocks, not isinstance(group.spec, RecurrentSpec)))
    geometry = choose_geometry(kinds)
    split: list[Sequence[LayerCache]] = []
    tokens: list[int] = []
    for members_of, size, pieces in zip(members, sizes, geometry.pieces, strict=True):
        first = 0
        for count in pieces:
            split.append(members_of[first : first + count])
            tokens.append(size)
            first += count
    return _cutting(split, tokens, geometry.granule_bytes, geometry.extent_granules, shared)


def _aligned(count_bytes: int) -> int:
    """Return bytes rounded up so that a strided view of any element type begins on an element."""
    return -(-count_bytes // _VIEW_BYTES) * _VIEW_BYTES


def _sizes_tokens(groups: Sequence[tuple[CacheSpec, int]], block_tokens: int) -> list[int]:
    """Return the tokens of a block of each group, given spec and layers.

    What was asked for, or the next multiple of a compression ratio. A group that keeps all tokens in blocks far
    smaller than those of another group (windows and states apart) takes larger ones, to save bookkeeping: up to
    `_MOST_TOKENS`, or one more doubling of a larger ratio. Hits do not become coarser: they end at hash units.
    """
    sizes = [
        math.lcm(spec.ratio_tokens, block_tokens) if isinstance(spec, CompressedSpec | IndexKeysSpec) else block_tokens
        for spec, _ in groups
    ]
    largest = max(
        (
            spec.block_bytes(tokens) * layers
            for (spec, layers), tokens in zip(groups, sizes, strict=True)
            if not isinstance(spec, RecurrentSpec)
        ),
        default=0,
    )
    for place, (spec, layers) in enumerate(groups):
        if isinstance(spec, FullAttentionSpec | LatentSpec | CompressedSpec | IndexKeysSpec):
            most = max(_MOST_TOKENS, 2 * sizes[place] if sizes[place] > _MOST_TOKENS else 0)
            while 2 * sizes[place] <= most and _SMALL * spec.block_bytes(sizes[place]) * layers <= largest:
                sizes[place] *= 2
    return sizes


def _too_little(cutting: _Cutting, bytes_available: int, extents: int, max_model_len: int) -> InsufficientMemoryError:
    least = cutting.layout(extents)
    need = [
        group_need_blocks(group, max_model_len, batch_tokens=max_model_len, in_flight=1, encoder_tokens=1)
        for group in cutting.groups
    ]
    sequence_bytes = cutting.layout(cutting.extents_for(need)).total_bytes()
    blocks = ", ".join(f"{kind_of(group.spec)} {group.block_bytes():,}" for group in cutting.groups)
    usable = min(group.num_blocks for group in least.groups) - _NULL_BLOCKS
    return InsufficientMemoryError(
        f"the KV cache has {bytes_available:,} bytes, but {usable} usable block{'s' * (usable != 1)} and the null "
        f"block take {least.total_bytes():,} bytes (bytes of one block: {blocks}); one sequence of {max_model_len} "
        f"tokens takes {sequence_bytes:,} bytes: raise --kv-cache-memory-bytes, or lower --block-size or "
        "--num-blocks-override",
        param="kv_cache_memory_bytes",
    )

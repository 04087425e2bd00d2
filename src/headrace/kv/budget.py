"""How KV memory is divided: groups of layers, tokens a block, granules, extents; and how long a sequence it holds.

Arithmetic only. Must not ask a device: the bytes are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headrace.base.errors import ConfigError, InsufficientMemoryError, invariant
from headrace.kv.geometry import ALIGN_BYTES, Geometry, choose_geometry
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    KvLayout,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    kind_of,
)

_UNBOUNDED_TOKENS = 1 << 40


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
    groups = _groups(members, sizes)
    if not groups:
        return KvLayout([], ALIGN_BYTES, 0, 0, shared)
    padded = [-(-group.block_bytes() // 16) * 16 for group in groups]
    granule_bytes = math.gcd(*padded)
    granules = [size // granule_bytes for size in padded]
    geometry = Geometry(granule_bytes, max(granules), granules, [0.0] * len(groups))
    return _cut(groups, geometry, _extents_for(geometry, counts), shared)


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
        return KvLayout([], ALIGN_BYTES, 0, 0, shared)
    groups = _groups(members, [_block_tokens(layers[0].spec, block_tokens) for layers in members])
    geometry = _geometry(groups)
    counts = [num_blocks_override or 1] * len(groups)
    extents = _extents_for(geometry, counts)
    if bytes_available is not None:
        usable_bytes = bytes_available - max(geometry.block_granules) * geometry.granule_bytes
        fitting = max(0, usable_bytes // (geometry.extent_granules * geometry.granule_bytes))
        if fitting < extents:
            raise _too_little(groups, geometry, bytes_available, extents, max_model_len)
        extents = fitting if num_blocks_override is None else extents
    return _cut(groups, geometry, extents, shared)


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


def _groups(members: Sequence[Sequence[LayerCache]], sizes: Sequence[int]) -> list[GroupLayout]:
    groups = []
    for index, (layers, tokens) in enumerate(zip(members, sizes, strict=True)):
        spec = layers[0].spec
        parts = [layer.part for layer in layers]
        groups.append(
            GroupLayout(
                group=index,
                spec=spec,
                layer_indices=[layer.layer_index for layer in layers],
                block_tokens=0 if isinstance(spec, RecurrentSpec) else tokens,
                num_blocks=1,
                parts=parts if any(part != "kv" for part in parts) else [],
            )
        )
    return groups


def _block_tokens(spec: CacheSpec, block_tokens: int) -> int:
    """Return the tokens of a group's block: what was asked for, or the next multiple of a compression ratio."""
    ratio = spec.ratio_tokens if isinstance(spec, CompressedSpec | IndexKeysSpec) else 1
    return math.lcm(ratio, block_tokens)


def _geometry(groups: Sequence[GroupLayout]) -> Geometry:
    """Return how memory is cut for groups whose block tokens are known. One group alone pads nothing."""
    if len(groups) == 1:
        return Geometry(-(-groups[0].block_bytes() // 16) * 16, 1, [1], [0.0])
    return choose_geometry([group.block_bytes() for group in groups], [1.0] * len(groups))


def _extents_for(geometry: Geometry, counts: Sequence[int]) -> int:
    """Return the extents in which every group has so many blocks at once."""
    return sum(
        -(-count // (geometry.extent_granules // size))
        for count, size in zip(counts, geometry.block_granules, strict=True)
    )


def _cut(groups: Sequence[GroupLayout], geometry: Geometry, extents: int, shared: list[tuple[int, int]]) -> KvLayout:
    """Return the layout with so many extents; one group alone has them as a single one, for good."""
    extent_granules = geometry.extent_granules
    if len(groups) == 1:
        extent_granules, extents = extent_granules * extents, 1
    cut = [
        msgspec.structs.replace(group, num_blocks=1 + extents * (extent_granules // size), block_granules=size)
        for group, size in zip(groups, geometry.block_granules, strict=True)
    ]
    return KvLayout(cut, geometry.granule_bytes, extent_granules, extents, shared)


def _too_little(
    groups: Sequence[GroupLayout], geometry: Geometry, bytes_available: int, extents: int, max_model_len: int
) -> InsufficientMemoryError:
    least_bytes = _cut(groups, geometry, extents, []).total_bytes()
    need = [
        group_need_blocks(group, max_model_len, batch_tokens=max_model_len, in_flight=1, encoder_tokens=1)
        for group in groups
    ]
    sequence_bytes = _cut(groups, geometry, _extents_for(geometry, need), []).total_bytes()
    blocks = ", ".join(f"{kind_of(group.spec)} {group.block_bytes():,}" for group in groups)
    usable = extents * geometry.extent_granules // max(geometry.block_granules)
    return InsufficientMemoryError(
        f"the KV cache has {bytes_available:,} bytes, but {usable} usable blocks and the null block take "
        f"{least_bytes:,} bytes (bytes of one block: {blocks}); one sequence of {max_model_len} tokens takes "
        f"{sequence_bytes:,} bytes: raise --kv-cache-memory-bytes, or lower --block-size or --num-blocks-override",
        param="kv_cache_memory_bytes",
    )

"""How many KV blocks fit into given memory, and how long a sequence they hold. Arithmetic only.

Must not ask a device: the bytes are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import InsufficientMemoryError, invariant
from headrace.types.cache_specs import CacheSpec, GroupLayout, KvLayout, LayerCache

_NULL_BLOCKS = 1


def make_layout(
    layer_caches: Sequence[LayerCache],
    *,
    block_tokens: int,
    bytes_available: int | None,
    num_blocks_override: int | None,
    max_model_len: int,
) -> KvLayout:
    """Divide memory into blocks.

    Layers with equal specs form a group. Every group gets the same number of blocks, because each of today's kinds
    keeps all tokens and so needs them at the same rate.

    Args:
        layer_caches: what the model declares.
        block_tokens: tokens in a block.
        bytes_available: memory for the KV cache of one rank; None if the number of blocks is given.
        num_blocks_override: usable blocks, in place of what fits.
        max_model_len: longest sequence in tokens, for the message of the error.

    Returns:
        The layout; ``num_blocks`` counts the null block too.

    Raises:
        InsufficientMemoryError: not even one usable block a group fits, or the given number does not.
    """
    invariant(len(layer_caches) > 0, "a model without a layer cache needs no layout")
    invariant(bytes_available is not None or num_blocks_override is not None, "neither bytes nor blocks are given")
    layers_of: dict[CacheSpec, list[int]] = {}
    for layer in sorted(layer_caches, key=lambda cache: cache.layer_index):
        layers_of.setdefault(layer.spec, []).append(layer.layer_index)
    one_block = KvLayout(
        [GroupLayout(group, spec, layers, block_tokens, 1) for group, (spec, layers) in enumerate(layers_of.items())]
    )
    row_bytes = one_block.total_bytes()
    if num_blocks_override is not None:
        num_blocks = num_blocks_override + _NULL_BLOCKS
    else:
        num_blocks = (bytes_available or 0) // row_bytes
    least_blocks = max(num_blocks, 1 + _NULL_BLOCKS)
    if bytes_available is not None and least_blocks * row_bytes > bytes_available:
        sequence_bytes = (-(-max_model_len // block_tokens) + _NULL_BLOCKS) * row_bytes
        raise InsufficientMemoryError(
            f"the KV cache has {bytes_available:,} bytes, but {least_blocks} blocks of {block_tokens} tokens (one is "
            f"the null block) take {least_blocks * row_bytes:,} bytes; one sequence of {max_model_len} tokens takes "
            f"{sequence_bytes:,} bytes: raise --kv-cache-memory-bytes, or lower --block-size or --num-blocks-override",
            param="kv_cache_memory_bytes",
        )
    return KvLayout(
        [
            GroupLayout(group.group, group.spec, group.layer_indices, block_tokens, num_blocks)
            for group in one_block.groups
        ]
    )


def capacity_tokens(layout: KvLayout) -> int:
    """Return the length in tokens of the longest single sequence whose KV fits."""
    return min((group.num_blocks - _NULL_BLOCKS) * group.block_tokens for group in layout.groups)

"""How a KV layout is split between the groups, and how many requests of a length it holds. Arithmetic on the layout.

Must not know models or devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.kv.budget import capacity_tokens, fits, group_need_blocks, make_layout
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    KvLayout,
    LayerCache,
    RecurrentSpec,
    SlidingWindowSpec,
    kind_of,
)

_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)


class Concurrency(msgspec.Struct, frozen=True):
    """How many requests of one length the KV cache holds at once, before ``--max-num-seqs``."""

    context_tokens: int
    requests: int


class GroupShare(msgspec.Struct, frozen=True):
    """What one group takes.

    Attributes:
        kind: of its spec.
        layers: of the group. A large recurrent state is kept in several groups of some layers each.
        block_tokens: tokens in a block; 0 for a recurrent state.
        block_bytes: of one block without padding.
        block_granules: of one block.
        padding: share of a block's granules that hold nothing.
        request_blocks: most blocks that a request of the planned length ever holds.
        share: of the bytes that such a request holds.
    """

    kind: str
    layers: int
    block_tokens: int
    block_bytes: int
    block_granules: int
    padding: float
    request_blocks: int
    share: float


class MemorySplit(msgspec.Struct, frozen=True):
    """How memory of a size is divided between the groups of a model.

    Attributes:
        granule_bytes: of a granule.
        extent_bytes: of an extent; one group alone has a single one.
        extents: how many.
        groups: what each group takes of a request of the planned length.
        concurrency: requests at once by length.
        longest_tokens: longest single request that fits.
    """

    granule_bytes: int
    extent_bytes: int
    extents: int
    groups: list[GroupShare]
    concurrency: list[Concurrency]
    longest_tokens: int


def plan_split(
    layer_caches: Sequence[LayerCache],
    bytes_available: int,
    *,
    block_tokens: int,
    max_len: int,
    batch_tokens: int,
    in_flight: int = 1,
) -> MemorySplit:
    """Divide memory for declared caches, whether or not the model can be run.

    Args:
        layer_caches: what a model declares on one rank.
        bytes_available: of one rank.
        block_tokens: tokens in a block of attention.
        max_len: length of the request whose shares are told.
        batch_tokens: most tokens of one step.
        in_flight: plans made before the first result is applied.

    Raises:
        InsufficientMemoryError: not even one block a group fits.
        ConfigError: declarations that contradict each other.
    """
    layout = make_layout(
        layer_caches,
        block_tokens=block_tokens,
        bytes_available=bytes_available,
        num_blocks_override=None,
        max_model_len=max_len,
    )
    return MemorySplit(
        granule_bytes=layout.granule_bytes,
        extent_bytes=layout.extent_granules * layout.granule_bytes,
        extents=layout.num_extents,
        groups=group_shares(layout, max_len, batch_tokens, in_flight),
        concurrency=concurrency(layout, max_len, batch_tokens, in_flight),
        longest_tokens=capacity_tokens(layout, batch_tokens=batch_tokens, in_flight=in_flight),
    )


def request_blocks(layout: KvLayout, tokens: int, batch_tokens: int, in_flight: int) -> list[int]:
    """Return per group the most blocks that a request of ``tokens`` tokens ever holds at once."""
    return [group_need_blocks(group, tokens, batch_tokens=batch_tokens, in_flight=in_flight) for group in layout.groups]


def request_bytes(layout: KvLayout, tokens: int, batch_tokens: int, in_flight: int) -> int:
    """Return the bytes that a request of ``tokens`` tokens takes from an empty memory, null blocks included."""
    needs = request_blocks(layout, tokens, batch_tokens, in_flight)
    if len(layout.groups) == 1:
        group = layout.groups[0]
        return (needs[0] + 1) * group.block_granules * layout.granule_bytes
    extents = sum(
        -(-need // (layout.extent_granules // group.block_granules))
        for need, group in zip(needs, layout.groups, strict=True)
    )
    return (layout.null_granules + extents * layout.extent_granules) * layout.granule_bytes


def token_bytes(layout: KvLayout) -> int:
    """Return the bytes that each further token of a long request takes: groups that keep every token."""
    return sum(
        group.block_bytes() // group.block_tokens
        for group in layout.groups
        if not isinstance(group.spec, RecurrentSpec | CrossAttentionSpec | SlidingWindowSpec | ChunkedLocalSpec)
    )


def concurrency(layout: KvLayout, max_len: int, batch_tokens: int, in_flight: int) -> list[Concurrency]:
    """Return how many requests of each length fit at once, for powers of two up to the longest request.

    Args:
        layout: of the memory.
        max_len: longest request in tokens.
        batch_tokens: most tokens of one step; a window is fed by so many at once in one request only.
        in_flight: plans made before the first result is applied.
    """
    contexts = [length for length in _CONTEXTS if length < max_len] + [max_len]
    return [Concurrency(length, _at_once(layout, length, batch_tokens, in_flight)) for length in contexts]


def group_shares(layout: KvLayout, tokens: int, batch_tokens: int, in_flight: int) -> list[GroupShare]:
    """Return what each group takes of a request of ``tokens`` tokens."""
    needs = request_blocks(layout, tokens, batch_tokens, in_flight)
    held = [
        need * group.block_granules * layout.granule_bytes for need, group in zip(needs, layout.groups, strict=True)
    ]
    return [
        GroupShare(
            kind=kind_of(group.spec),
            layers=len(group.layer_indices),
            block_tokens=group.block_tokens,
            block_bytes=group.block_bytes(),
            block_granules=group.block_granules,
            padding=1 - group.block_bytes() / (group.block_granules * layout.granule_bytes),
            request_blocks=need,
            share=taken / max(1, sum(held)),
        )
        for group, need, taken in zip(layout.groups, needs, held, strict=True)
    ]


def _at_once(layout: KvLayout, tokens: int, batch_tokens: int, in_flight: int) -> int:
    # One request may be in its prefill; the others decode, and their windows are fed a token at a time.
    first = request_blocks(layout, tokens, batch_tokens, in_flight)
    other = request_blocks(layout, tokens, 1, in_flight)

    def fit(requests: int) -> bool:
        return fits(layout, [one + (requests - 1) * more for one, more in zip(first, other, strict=True)])

    if not layout.groups or not fit(1):
        return 0
    low, high = 1, _most(layout, other)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low


def _most(layout: KvLayout, needs: Sequence[int]) -> int:
    """Return a number of requests that certainly does not fit any more."""
    bounds = [group.num_blocks // need for group, need in zip(layout.groups, needs, strict=True) if need]
    return max(1, min(bounds, default=1)) + 1

"""Tiny KV layouts after the pattern of real models: which kinds of cache meet, with blocks of odd sizes.

Must not choose what the product would choose; sizes are drawn so that blocks run out and extents change hands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from headrace.kv.budget import fixed_layout
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    IndexKeysSpec,
    KvLayout,
    LatentSpec,
    LayerCache,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    StatePart,
)


def _full(rng: random.Random) -> CacheSpec:
    return FullAttentionSpec(rng.choice([1, 2, 3]), 4, 4, 2)


def _sliding(rng: random.Random) -> CacheSpec:
    return SlidingWindowSpec(rng.choice([1, 2]), 4, 4, 2, rng.choice([1, 2, 3, 4, 5, 7, 8, 12]))


def _chunked(rng: random.Random) -> CacheSpec:
    return ChunkedLocalSpec(rng.choice([1, 2]), 4, 4, 2, rng.choice([1, 2, 3, 4, 6, 8, 10]))


def _latent(rng: random.Random) -> CacheSpec:
    return LatentSpec(rng.choice([16, 48]))


def _recurrent(rng: random.Random) -> CacheSpec:
    return RecurrentSpec((StatePart("conv", (rng.choice([4, 8]),), 4), StatePart("state", (rng.choice([8, 40]),), 4)))


def _compressed(rng: random.Random) -> CacheSpec:
    return CompressedSpec(rng.choice([16, 32]), rng.choice([2, 3, 4]))


def _index(rng: random.Random) -> CacheSpec:
    return IndexKeysSpec(16, rng.choice([1, 2, 4]))


def _cross(rng: random.Random) -> CacheSpec:
    return CrossAttentionSpec(1, 4, 4, rng.choice([2, 4]))


def _deepseek_v4(rng: random.Random) -> list[CacheSpec]:
    ratio = rng.choice([2, 4])
    specs: list[CacheSpec] = [CompressedSpec(32, ratio), IndexKeysSpec(16, ratio)]
    # The raw tokens of an unfinished record, and of the window beside the records.
    specs.append(SlidingWindowSpec(1, 8, 0, 2, rng.choice([ratio, ratio + 1, 2 * ratio])))
    if rng.random() < 0.5:
        specs.append(CompressedSpec(16, 3 * ratio))
    return specs


_KINDS: tuple[Callable[[random.Random], CacheSpec], ...] = (
    _full,
    _sliding,
    _chunked,
    _latent,
    _recurrent,
    _compressed,
    _index,
    _cross,
)

TEMPLATES: dict[str, Callable[[random.Random], list[CacheSpec]]] = {
    "llama": lambda rng: [_full(rng)],
    "gemma": lambda rng: [_sliding(rng), _full(rng)],
    "llama 4": lambda rng: [_chunked(rng), _full(rng)],
    "qwen3-next": lambda rng: [_recurrent(rng), _full(rng)],
    "kimi": lambda rng: [_recurrent(rng), _latent(rng)],
    "gpt-oss": lambda rng: [_sliding(rng), _full(rng), SharedSpec(1)],
    "deepseek v4": _deepseek_v4,
    "mamba": lambda rng: [_recurrent(rng)],
    "hymba": lambda rng: [_recurrent(rng), _sliding(rng), _full(rng)],
    "two windows": lambda rng: [_sliding(rng), _chunked(rng), _full(rng)],
    "two states": lambda rng: [_recurrent(rng), _recurrent(rng), _full(rng)],
    "cross decoder": lambda rng: [_full(rng), _cross(rng)],
    "any mix": lambda rng: [make(rng) for make in rng.sample(_KINDS, rng.randint(2, 4))],
}
"""Name -> specs of the layers."""


def draw_layout(rng: random.Random, template: str) -> KvLayout:
    """Draw the sizes of a layout.

    Args:
        rng: where everything comes from.
        template: a name of `TEMPLATES`.
    """
    specs = TEMPLATES[template](rng)
    unit = rng.choice([1, 1, 2, 2, 3, 4])
    sizes = {spec: _block_tokens(rng, spec, unit) for spec in specs if not isinstance(spec, SharedSpec)}
    return build_layout(specs, list(sizes.values()), [min(rng.randint(4, 16), rng.randint(4, 16)) for _ in sizes])


def build_layout(specs: Sequence[CacheSpec], block_tokens: Sequence[int], usable_blocks: Sequence[int]) -> KvLayout:
    """Return the layout of a model with one layer for each spec.

    Args:
        specs: of the layers, in order.
        block_tokens: of each group; ignored for recurrent ones.
        usable_blocks: of each group, while all others have theirs.
    """
    layers = [LayerCache(index, spec) for index, spec in enumerate(specs)]
    return fixed_layout(layers, block_tokens=block_tokens, usable_blocks=usable_blocks)


def full_layout(blocks: Sequence[tuple[int, int]]) -> KvLayout:
    """Return a layout of full attention from (tokens in a block, usable blocks) of each group."""
    specs = [FullAttentionSpec(group + 1, 4, 4, 4) for group in range(len(blocks))]
    return build_layout(specs, [size for size, _ in blocks], [usable for _, usable in blocks])


def _block_tokens(rng: random.Random, spec: CacheSpec, unit: int) -> int:
    ratio = spec.ratio_tokens if isinstance(spec, CompressedSpec | IndexKeysSpec) else 1
    base = math.lcm(unit, ratio)
    return base * rng.choice([1, 1, 2, 3] if base <= 2 else [1, 1, 2])

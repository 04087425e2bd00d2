"""Cache declarations of published models on one rank, as data: what the memory must be able to divide.

bfloat16 keys and values; states and compressor windows in float32, convolutions in bfloat16.
"""

from collections.abc import Callable

from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CompressedSpec,
    FullAttentionSpec,
    IndexKeysSpec,
    LatentSpec,
    LayerCache,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)


def state(heads: int, key_dim: int, value_dim: int, conv_channels: int, conv_places: int = 3) -> RecurrentSpec:
    return RecurrentSpec(
        (
            StatePart("conv", (conv_places, conv_channels), 2),
            StatePart("state", (heads, key_dim, value_dim), 4),
        )
    )


def by_layer(specs: list[CacheSpec]) -> list[LayerCache]:
    return [LayerCache(index, spec) for index, spec in enumerate(specs)]


def kimi_linear() -> list[LayerCache]:
    """27 layers: latent attention at 4, 8, ..., 24, 27 (from 1), KDA with 32 heads of 128 x 128 elsewhere."""
    latent, kda = LatentSpec(1152), state(32, 128, 128, 3 * 32 * 128)
    return by_layer([latent if place in (4, 8, 12, 16, 20, 24, 27) else kda for place in range(1, 28)])


def qwen3_next() -> list[LayerCache]:
    """48 layers, every fourth full attention (2 KV heads of 256), the others gated delta rule."""
    full, gdn = FullAttentionSpec(2, 256, 256, 2), state(32, 128, 128, 2 * 16 * 128 + 32 * 128)
    return by_layer([full if place % 4 == 0 else gdn for place in range(1, 49)])


def gemma_4() -> list[LayerCache]:
    """60 layers: 50 sliding (1024 tokens, heads of 256) and 10 global (heads of 512), the last one global."""
    sliding, full = SlidingWindowSpec(4, 256, 256, 2, 1024), FullAttentionSpec(4, 512, 512, 2)
    return by_layer([full if place % 6 == 0 else sliding for place in range(1, 61)])


def llama_4_scout() -> list[LayerCache]:
    """48 layers: every fourth full attention, the others within chunks of 8192 tokens."""
    full, chunked = FullAttentionSpec(8, 128, 128, 2), ChunkedLocalSpec(8, 128, 128, 2, 8192)
    return by_layer([full if place % 4 == 0 else chunked for place in range(1, 49)])


def gpt_oss_20b() -> list[LayerCache]:
    """24 layers, sliding (128 tokens) and full in turn, sliding first."""
    sliding, full = SlidingWindowSpec(8, 64, 64, 2, 128), FullAttentionSpec(8, 64, 64, 2)
    return by_layer([full if place % 2 == 0 else sliding for place in range(1, 25)])


def deepseek_v4_flash() -> list[LayerCache]:
    """43 layers, all with a window of raw records; 20 compress 4 tokens (and index them), 23 compress 128.

    The unfinished window of a compressor is kept as a small sliding group of its projections and gates.
    """
    raw = SlidingWindowSpec(1, 584, 0, 1, 128)
    of_4, of_128, keys = CompressedSpec(584, 4), CompressedSpec(584, 128), IndexKeysSpec(132, 4)
    window_4 = SlidingWindowSpec(1, 2 * (512 + 128), 2 * (512 + 128), 4, 8)
    window_128 = SlidingWindowSpec(1, 512, 512, 4, 128)
    caches = []
    for layer in range(43):
        caches.append(LayerCache(layer, raw, "raw"))
        if layer >= 2 and layer % 2 == 1:
            caches += [LayerCache(layer, of_4, "records"), LayerCache(layer, keys, "index")]
            caches.append(LayerCache(layer, window_4, "window"))
        else:
            caches += [LayerCache(layer, of_128, "records"), LayerCache(layer, window_128, "window")]
    return caches


def nemotron_h_8b() -> list[LayerCache]:
    """52 blocks of one mixer each: 24 Mamba-2, 4 attention, the rest keeps nothing."""
    full, mamba = FullAttentionSpec(8, 128, 128, 2), state(128, 64, 128, 128 * 64 + 2 * 8 * 128)
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    return [
        LayerCache(place, mamba if letter == "M" else full) for place, letter in enumerate(pattern) if letter != "-"
    ]


SHEETS: dict[str, Callable[[], list[LayerCache]]] = {
    "Kimi Linear": kimi_linear,
    "Qwen3-Next": qwen3_next,
    "Gemma 4": gemma_4,
    "Llama 4 Scout": llama_4_scout,
    "gpt-oss-20b": gpt_oss_20b,
    "DeepSeek V4 Flash": deepseek_v4_flash,
    "Nemotron-H 8B": nemotron_h_8b,
}

import pytest

from headrace.base.errors import InsufficientMemoryError
from headrace.kv.budget import capacity_tokens, make_layout
from headrace.types.cache_specs import FullAttentionSpec, KvLayout, LayerCache

SPEC = FullAttentionSpec(kv_heads=2, key_dim=8, value_dim=8, dtype_bytes=2)  # 64 bytes a token and layer
WIDE = FullAttentionSpec(kv_heads=4, key_dim=8, value_dim=8, dtype_bytes=2)  # 128


def layers(*specs: FullAttentionSpec) -> list[LayerCache]:
    return [LayerCache(index, spec) for index, spec in enumerate(specs)]


def layout_of(
    caches: list[LayerCache], bytes_available: int | None, override: int | None = None, block_tokens: int = 16
) -> KvLayout:
    return make_layout(
        caches,
        block_tokens=block_tokens,
        bytes_available=bytes_available,
        num_blocks_override=override,
        max_model_len=2048,
    )


def test_all_bytes_become_blocks_and_the_null_block_is_one_of_them() -> None:
    layout = layout_of(layers(SPEC, SPEC), 10 * 16 * 128 + 100)
    (group,) = layout.groups
    assert (group.num_blocks, group.layer_indices, group.block_bytes()) == (10, [0, 1], 16 * 128)
    assert capacity_tokens(layout) == 9 * 16


def test_layers_with_equal_specs_share_a_group() -> None:
    layout = layout_of(list(reversed(layers(SPEC, WIDE, SPEC))), 5 * 16 * 256)
    assert [(group.group, group.layer_indices, group.num_blocks) for group in layout.groups] == [
        (0, [0, 2], 5),
        (1, [1], 5),
    ]
    assert layout.total_bytes() == 5 * 16 * 256


def test_the_override_counts_usable_blocks() -> None:
    layout = layout_of(layers(SPEC), None, override=8, block_tokens=4)
    assert layout.groups[0].num_blocks == 9
    assert capacity_tokens(layout) == 32


def test_too_little_memory_says_how_much_is_needed_and_what_to_change() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"1,024 bytes.* 2,048 bytes.*--kv-cache-memory-bytes") as caught:
        layout_of(layers(SPEC), 1024)
    assert caught.value.param == "kv_cache_memory_bytes"
    assert layout_of(layers(SPEC), 2048).groups[0].num_blocks == 2


def test_an_override_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="9 blocks"):
        layout_of(layers(SPEC), 4096, override=8)

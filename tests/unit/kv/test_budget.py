import pytest

from headrace.base.errors import ConfigError, InsufficientMemoryError
from headrace.kv.budget import capacity_tokens, fixed_layout, group_need_blocks, make_layout
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    KvLayout,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    StatePart,
)

SPEC = FullAttentionSpec(kv_heads=2, key_dim=8, value_dim=8, dtype_bytes=2)  # 64 bytes a token and layer
WIDE = FullAttentionSpec(kv_heads=4, key_dim=8, value_dim=8, dtype_bytes=2)  # 128
SLIDING = SlidingWindowSpec(2, 8, 8, 2, 40)
CHUNKED = ChunkedLocalSpec(2, 8, 8, 2, 64)
STATE = RecurrentSpec((StatePart("state", (4, 32, 32), 4),))  # 16 KiB
CROSS = CrossAttentionSpec(2, 8, 8, 2)


def layers(*specs: CacheSpec) -> list[LayerCache]:
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


def test_one_group_pads_nothing_and_has_all_bytes_as_blocks_for_good() -> None:
    layout = layout_of(layers(SPEC, SPEC), 10 * 16 * 128 + 100)
    (group,) = layout.groups
    assert (group.num_blocks, group.layer_indices, group.block_bytes()) == (10, [0, 1], 16 * 128)
    assert (layout.granule_bytes, group.block_granules, layout.num_extents) == (16 * 128, 1, 1)
    assert layout.total_bytes() == 10 * 16 * 128
    assert capacity_tokens(layout) == 9 * 16


def test_layers_with_equal_specs_share_a_group_and_groups_share_the_memory() -> None:
    layout = layout_of(list(reversed(layers(SPEC, WIDE, SPEC))), 64 * 16 * 256)
    assert [(group.group, group.layer_indices) for group in layout.groups] == [(0, [0, 2]), (1, [1])]
    assert layout.total_bytes() <= 64 * 16 * 256
    assert [group.num_blocks for group in layout.groups] == [group.num_blocks for group in layout.groups[:1]] * 2
    assert layout.groups[0].num_blocks > 2 * 64 - 8, "either group may have nearly everything"


def test_kinds_that_keep_nothing_take_no_group() -> None:
    caches = [LayerCache(0, SPEC), LayerCache(1, NoCacheSpec()), LayerCache(2, SharedSpec(0)), LayerCache(3, SPEC)]
    layout = layout_of(caches, 1 << 16)
    assert [group.layer_indices for group in layout.groups] == [[0, 3]]
    assert layout.shared_layers == [(2, 0)]


def test_a_model_without_any_cache_has_an_empty_layout() -> None:
    layout = layout_of(layers(NoCacheSpec()), 1 << 16)
    assert (layout.groups, layout.total_bytes()) == ([], 0)


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([LayerCache(0, SPEC), LayerCache(1, SharedSpec(5))], "layer 5"),
        ([LayerCache(0, SPEC), LayerCache(1, SharedSpec(2)), LayerCache(2, SharedSpec(0))], "layer 2"),
        ([LayerCache(0, SPEC), LayerCache(0, WIDE)], "twice"),
    ],
)
def test_declarations_that_contradict_each_other_are_refused(caches: list[LayerCache], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(caches, 1 << 20)


def test_parts_of_a_layer_are_told_apart() -> None:
    caches = [LayerCache(0, SLIDING, "raw"), LayerCache(0, CompressedSpec(64, 4), "records"), LayerCache(1, SPEC)]
    groups = layout_of(caches, 1 << 20).groups
    assert [(group.layer_indices, group.parts) for group in groups] == [([0], ["raw"]), ([0], ["records"]), ([1], [])]


def test_a_compressed_block_is_a_multiple_of_its_ratio() -> None:
    caches = [LayerCache(0, CompressedSpec(64, 4)), LayerCache(1, CompressedSpec(64, 128)), LayerCache(2, WIDE)]
    caches.append(LayerCache(3, IndexKeysSpec(32, 6)))
    for group in layout_of(caches, 1 << 24).groups:
        if isinstance(group.spec, CompressedSpec | IndexKeysSpec):
            assert group.block_tokens % group.spec.ratio_tokens == 0
    assert [group.block_tokens for group in layout_of(caches, 1 << 24).groups][2] == 16


def test_small_blocks_take_more_tokens_but_windows_and_states_do_not_count() -> None:
    huge = SlidingWindowSpec(64, 8, 8, 2, 40)
    sizes = {type(g.spec).__name__: g.block_tokens for g in layout_of(layers(SPEC, huge, STATE), 1 << 26).groups}
    assert sizes == {"FullAttentionSpec": 64, "SlidingWindowSpec": 16, "RecurrentSpec": 0}
    sizes = {type(g.spec).__name__: g.block_tokens for g in layout_of(layers(SPEC, STATE), 1 << 26).groups}
    assert sizes == {"FullAttentionSpec": 16, "RecurrentSpec": 0}


def test_a_state_of_many_layers_is_kept_in_pieces_beside_attention_but_whole_alone() -> None:
    states = [LayerCache(index, STATE) for index in range(12)]
    (alone,) = layout_of(states, 1 << 26).groups
    assert alone.layer_indices == list(range(12))
    mixed = layout_of([*states, LayerCache(12, SPEC), LayerCache(13, SPEC)], 1 << 26)
    pieces = [group.layer_indices for group in mixed.groups if isinstance(group.spec, RecurrentSpec)]
    assert len(pieces) > 1
    assert [layer for piece in pieces for layer in piece] == list(range(12))


@pytest.mark.parametrize("override", [1, 5, 40])
def test_the_override_counts_blocks_that_every_group_can_have_at_once(override: int) -> None:
    layout = layout_of(layers(SPEC, WIDE, STATE), None, override=override, block_tokens=4)
    extents = sum(-(-override // (layout.extent_granules // group.block_granules)) for group in layout.groups)
    assert layout.num_extents == extents
    (alone,) = layout_of(layers(SPEC), None, override=override, block_tokens=4).groups
    assert alone.num_blocks == override + 1


def test_too_little_memory_says_how_much_is_needed_and_what_to_change() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"1,024 bytes.* 2,048 bytes.*--kv-cache-memory-bytes") as caught:
        layout_of(layers(SPEC), 1024)
    assert caught.value.param == "kv_cache_memory_bytes"
    assert layout_of(layers(SPEC), 2048).groups[0].num_blocks == 2
    with pytest.raises(InsufficientMemoryError, match=r"full .* recurrent .*one sequence of 2048 tokens takes"):
        layout_of(layers(SPEC, STATE), 30_000)


def test_an_override_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="8 usable blocks"):
        layout_of(layers(SPEC), 4096, override=8)


def test_an_exact_layout_chooses_nothing() -> None:
    layout = fixed_layout(layers(SPEC, WIDE, STATE), block_tokens=[4, 8, 0], usable_blocks=[8, 3, 2])
    assert [group.block_tokens for group in layout.groups] == [4, 8, 0]
    assert layout.granule_bytes == 256
    assert [group.block_granules for group in layout.groups] == [1, 4, 64]
    assert (layout.extent_granules, layout.num_extents) == (64, 1 + 1 + 2)
    assert [group.num_blocks - 1 for group in layout.groups] == [4 * 64, 4 * 16, 4]


def need(spec: CacheSpec, tokens: int, block_tokens: int = 16, batch: int = 32, in_flight: int = 1) -> int:
    group = GroupLayout(0, spec, [0], 0 if isinstance(spec, RecurrentSpec) else block_tokens, 100)
    return group_need_blocks(group, tokens, batch_tokens=batch, in_flight=in_flight, encoder_tokens=50)


@pytest.mark.parametrize(
    ("spec", "tokens", "expected"),
    [
        (SPEC, 0, 0),
        (SPEC, 16, 1),
        (SPEC, 17, 2),
        (SPEC, 1000, 63),
        (STATE, 1, 1),
        (STATE, 100000, 1),
        (CROSS, 1, 4),
        (SLIDING, 16, 1),
        (SLIDING, 1000, 6),  # 39 of the window and 32 new ones, 71 tokens: 5 blocks, one more for the edge
        (CHUNKED, 1000, 6),  # 63 and 32 new ones, 95 tokens; chunks begin on a block edge
        (CompressedSpec(64, 4), 33, 3),
    ],
)
def test_the_most_blocks_that_a_sequence_holds(spec: CacheSpec, tokens: int, expected: int) -> None:
    assert need(spec, tokens) == expected


def test_steps_in_flight_and_uneven_chunks_need_more() -> None:
    assert need(SLIDING, 1000, in_flight=2) == 8  # 39 + 64 = 103: 7 + 1
    assert need(ChunkedLocalSpec(2, 8, 8, 2, 60), 1000) == 7  # 59 + 32 = 91: 6 + 1


def test_a_window_bounds_the_need_by_what_is_ever_held() -> None:
    """Against a walk: chunks of a step are written before the applied part is freed behind."""
    for window in (1, 7, 16, 33, 40):
        spec = SlidingWindowSpec(1, 8, 8, 2, window)
        for batch in (1, 5, 32):
            held = 0
            for applied in range(0, 300, batch):
                first = max(0, applied - window + 1) // 16
                held = max(held, -(-(applied + batch) // 16) - first)
            assert held <= need(spec, 1000, batch=batch), (window, batch)


def test_the_longest_sequence_shares_the_extents_of_all_groups() -> None:
    layout = fixed_layout(layers(SPEC, STATE), block_tokens=[16, 0], usable_blocks=[16, 2])
    # An extent is one state or 16 blocks of 1 KiB; of the three extents one goes to the state.
    assert capacity_tokens(layout) == 2 * 16 * 16
    windowed = fixed_layout(layers(SPEC, SLIDING), block_tokens=16, usable_blocks=[20, 6])
    assert capacity_tokens(windowed, batch_tokens=32) == 20 * 16
    assert capacity_tokens(windowed) == 13 * 16, "if all may be computed in one step, the window saves nothing"


def test_a_bounded_model_has_no_longest_sequence() -> None:
    assert capacity_tokens(fixed_layout(layers(STATE), block_tokens=0, usable_blocks=1)) >= 1 << 30
    assert capacity_tokens(fixed_layout(layers(CROSS), block_tokens=16, usable_blocks=1), encoder_tokens=17) == 0

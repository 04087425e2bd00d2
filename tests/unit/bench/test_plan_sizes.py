"""Sizes of the plan against numbers worked out by hand from the shapes."""

import dataclasses

import pytest

from headrace.base.errors import ConfigError, UnsupportedModelError
from headrace.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.config.decoder import parse_decoder
from headrace.engine.model_bytes import (
    Formats,
    choose_formats,
    divides,
    idle_bytes,
    layer_caches,
    parameter_count,
    weight_bytes,
)
from headrace.engine.plan import make_plan
from headrace.engine.plan_memory import concurrency, group_shares, request_blocks, request_bytes, token_bytes
from headrace.kv.budget import fixed_layout
from headrace.platforms.devices import DEVICES, device_record
from headrace.types.cache_specs import FullAttentionSpec, LayerCache, RecurrentSpec, SlidingWindowSpec, StatePart

BF16, BF16_CPU = Formats("bfloat16"), Formats("bfloat16", packed=True)
INT8 = Formats("float32", int8=True, packed=True)
LLAMA_8B = parse_decoder(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
)
QWEN3_06B = parse_decoder(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
)
SMALL = {
    "Gemma3ForCausalLM": {"sliding_window": 8, "sliding_window_pattern": 2},
    "Llama4ForCausalLM": {
        "intermediate_size_mlp": 112, "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 8,
    },
    "Qwen3NextForCausalLM": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    },
}  # fmt: skip
"""What makes the families beside Llama's shape small."""
H200 = device_record("h200")


def config(**sections):
    made = EngineConfig(model=ModelConfig(model="m"))
    kinds = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
    for name, values in sections.items():
        current = getattr(made, name)
        assert isinstance(current, kinds[name])
        made = dataclasses.replace(made, **{name: dataclasses.replace(current, **values)})
    return made


def plan(decoder, device=H200, memory_bytes=None, quantized=False, **sections):
    return make_plan("m", decoder, device, memory_bytes or device.memory_bytes, config(**sections), quantized=quantized)


def test_llama_8b_parameters():
    # embedding and head 128256 x 4096; layer: q and o 4096 x 4096, k and v 1024 x 4096, three 14336 x 4096, two norms
    layer = 2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256 + 2 * 4096
    assert layer == 218_112_000
    assert parameter_count(LLAMA_8B) == 2 * 525_336_576 + 32 * layer + 4096 == 8_030_261_248


def test_qwen3_parameters():
    # tied head; layer: q and o 2048 x 1024, k and v 1024 x 1024, three 3072 x 1024, two norms of 1024 and two of 128
    layer = 2 * 2_097_152 + 2 * 1_048_576 + 3 * 3_145_728 + 2 * 1024 + 2 * 128
    assert parameter_count(QWEN3_06B) == 155_582_464 + 28 * layer + 1024 == 596_049_920


def test_llama_8b_on_h200():
    made = plan(LLAMA_8B)
    assert made.weights.total == 16_060_522_496
    assert made.weights.embedding == made.weights.head == 1_050_673_152
    assert made.kv_token_bytes == 32 * 8 * (128 + 128) * 2 == 131_072
    assert made.logits_bytes == 4 * 64 * 128256 * 4
    # widest place: 3 x hidden and gate, up and their product
    assert made.activation_bytes == 2048 * (3 * 4096 + 3 * 14336) * 2
    usable = int(143_771 * 2**20 * 0.9)
    rest = usable - 16_060_522_496 - made.activation_bytes - made.logits_bytes - (700 << 20)
    blocks = rest // (16 * 131_072) - 1
    assert made.kv_tokens == 16 * blocks
    assert made.kv_bytes == (blocks + 1) * 16 * 131_072
    assert made.fits
    assert made.max_model_len == 131_072
    used = made.weights.total + made.activation_bytes + made.logits_bytes + made.reserved_bytes + made.kv_bytes
    assert made.free_bytes == made.memory_bytes - used
    # 15.01 GB of layers and head at 4.8 TB/s
    assert made.decode_ms_floor == pytest.approx((16_060_522_496 - 1_050_673_152) / 4.8e12 * 1e3)
    assert made.decode_ms_floor == pytest.approx(3.127, abs=0.001)


def test_qwen3_on_h200():
    made = plan(QWEN3_06B)
    assert made.weights.total == 1_192_099_840
    assert made.weights.head == 0
    assert made.kv_token_bytes == 28 * 8 * 256 * 2 == 114_688
    assert made.decode_ms_floor == pytest.approx(1_192_099_840 / 4.8e12 * 1e3)
    assert [(row.context_tokens, row.requests) for row in made.concurrency][-1] == (
        40960,
        made.kv_tokens // 40960,
    )


def test_tensor_parallelism_divides_all_but_the_norms():
    one, two = weight_bytes(LLAMA_8B, BF16, 1), weight_bytes(LLAMA_8B, BF16, 2)
    norms = (32 * 2 + 1) * 4096 * 2
    assert two.total - norms == (one.total - norms) // 2
    assert plan(LLAMA_8B, parallel={"tensor_parallel_size": 2}).kv_token_bytes == 65_536
    # fewer KV heads than ranks: they are repeated
    assert plan(LLAMA_8B, parallel={"tensor_parallel_size": 16}).kv_token_bytes == 32 * 1 * 256 * 2
    with pytest.raises(UnsupportedModelError, match="--tensor-parallel-size 3"):
        plan(LLAMA_8B, parallel={"tensor_parallel_size": 3})


def test_formats_follow_the_rules_of_the_flags():
    cpu, auto = DEVICES["cpu"], ModelConfig()
    fp32 = dataclasses.replace(LLAMA_8B, checkpoint_dtype="float32")
    assert choose_formats(LLAMA_8B, cpu, auto, quantized=False) == BF16_CPU
    assert choose_formats(fp32, cpu, auto, quantized=False) == Formats("float32", packed=True)
    assert choose_formats(fp32, H200, auto, quantized=False) == BF16
    assert choose_formats(fp32, cpu, auto, quantized=True) == INT8
    assert choose_formats(fp32, H200, auto, quantized=True) == BF16
    assert choose_formats(fp32, cpu, ModelConfig(dtype="bfloat16"), quantized=True) == BF16_CPU
    assert choose_formats(LLAMA_8B, cpu, ModelConfig(quantization="int8"), quantized=False) == INT8


def test_the_cache_has_the_type_that_the_worker_gives_it():
    torch = pytest.importorskip("torch")
    from headrace.layers.context import cache_dtype

    for formats in (BF16, Formats("float32", packed=True), INT8):
        held = cache_dtype(getattr(torch, formats.dtype), "int8" if formats.int8 else "none")
        assert (formats.cache_dtype, formats.cache_element_bytes) == (str(held).removeprefix("torch."), held.itemsize)


def test_a_packed_head_is_a_copy_even_if_it_is_tied():
    made = weight_bytes(QWEN3_06B, BF16_CPU, 1)
    assert made.head == made.embedding == 151936 * 1024 * 2
    assert weight_bytes(QWEN3_06B, INT8, 1).head == 151936 * 1024 + 12 * 151936


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
        "Llama4ForCausalLM",
        "Qwen3NextForCausalLM",
    ],
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("formats", [Formats("float32"), Formats("float32", packed=True), BF16_CPU, INT8], ids=str)
def test_sizes_are_those_of_the_models_that_are_built(architecture, tied, formats):
    torch = pytest.importorskip("torch")
    from headrace.layers.context import ModelContext
    from headrace.models.registry import build_model
    from headrace.parallel.groups import TensorParallel

    decoder = parse_decoder(
        {
            "architectures": [architecture],
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 160,
            "tie_word_embeddings": tied,
            **SMALL.get(architecture, {}),
        }
    )
    context = ModelContext(
        dtype=getattr(torch, formats.dtype),
        device=torch.device("cpu"),
        tp=TensorParallel(),
        quantization="int8" if formats.int8 else "none",
        # The CPU packs fp32 where answers must be reproducible; Formats("float32") is what a GPU does.
        invariant=formats == Formats("float32", packed=True),
    )
    model = build_model(decoder, context)
    model.finalize()
    # A model may keep a norm once for each head; nothing else may differ.
    assert weight_bytes(decoder, formats, 1).total == pytest.approx(model.parameter_bytes(), rel=0.006)
    assert layer_caches(decoder, formats, 1) == model.layer_caches()


def test_the_caches_of_a_rank_are_those_of_its_model():
    torch = pytest.importorskip("torch")
    from headrace.layers.context import ModelContext
    from headrace.models.registry import build_model
    from headrace.parallel.groups import TensorParallel

    for architecture, fields in SMALL.items():
        decoder = parse_decoder(
            {"architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, **fields}
        )  # fmt: skip
        context = ModelContext(torch.float32, torch.device("cpu"), TensorParallel(1, 2), "none")
        model = build_model(decoder, context)
        assert layer_caches(decoder, Formats("float32"), 2) == model.layer_caches()
        assert weight_bytes(decoder, Formats("float32"), 2).total == pytest.approx(model.parameter_bytes(), rel=0.006)


def test_a_family_that_cannot_be_split_says_what_does_not_divide():
    fields = {**SMALL["Qwen3NextForCausalLM"], "linear_num_key_heads": 3, "linear_num_value_heads": 3}
    decoder = parse_decoder(
        {"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, **fields}
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="linear_num_key_heads 3 does not divide"):
        weight_bytes(decoder, BF16, 2)
    assert divides(decoder, 1)
    assert not divides(decoder, 2)


def test_a_decode_step_reads_only_the_chosen_experts():
    decoder = parse_decoder(
        {"architectures": ["Llama4ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160,
         **SMALL["Llama4ForCausalLM"]}
    )  # fmt: skip
    # 2 of 4 layers have 4 experts of 3 x 96 x 64, of which a token takes one
    assert idle_bytes(decoder, BF16, 1) == 2 * 3 * (3 * 96 * 64) * 2
    weights = weight_bytes(decoder, BF16, 1)
    read = weights.layers - idle_bytes(decoder, BF16, 1) + weights.head
    assert plan(decoder).decode_ms_floor == pytest.approx(read / 4.8e12 * 1e3)


def test_the_cache_of_a_cpu_is_bounded():
    made = plan(QWEN3_06B, DEVICES["cpu"], 1 << 40)
    assert made.kv_bytes <= 8 << 30
    assert made.kv_bytes > (8 << 30) - 16 * made.kv_token_bytes
    small = plan(QWEN3_06B, DEVICES["cpu"], 8 << 30)
    assert small.kv_bytes == pytest.approx(((8 << 30) - small.weights.total) * 0.3, abs=16 * small.kv_token_bytes)


def test_a_given_cache_size_is_kept():
    made = plan(QWEN3_06B, cache={"kv_cache_memory_bytes": 1 << 30})
    assert made.kv_tokens == 16 * ((1 << 30) // (16 * 114_688) - 1)


def test_without_a_length_the_cache_decides_and_a_given_length_must_fit():
    l4 = DEVICES["l4"]
    free = plan(LLAMA_8B, l4)
    assert free.fits
    assert free.max_model_len == free.kv_tokens < free.model_max_len
    asked = plan(LLAMA_8B, l4, model={"max_model_len": 65536})
    assert not asked.fits
    assert asked.advice[0].flag == f"--max-model-len {asked.kv_tokens}"


def test_weights_that_do_not_fit():
    made = plan(LLAMA_8B, DEVICES["l4"], 12 << 30)
    assert not made.fits
    assert made.kv_bytes == 0
    assert made.free_bytes < 0
    assert made.advice[0].flag == "--tensor-parallel-size 4"


def test_concurrency():
    spec = FullAttentionSpec(1, 8, 8, 2)
    one = fixed_layout([LayerCache(0, spec)], block_tokens=16, usable_blocks=100)
    rows = concurrency(one, 3000, 64, 1)
    assert [(row.context_tokens, row.requests) for row in rows] == [(1024, 1), (2048, 0), (3000, 0)]


def test_windows_and_states_leave_room_for_more_requests_and_the_shares_say_for_what():
    full, window = FullAttentionSpec(1, 8, 8, 2), SlidingWindowSpec(1, 8, 8, 2, 33)
    state = RecurrentSpec((StatePart("state", (1024,), 4),))
    caches = [LayerCache(0, full), LayerCache(1, window), LayerCache(2, state)]
    layout = fixed_layout(caches, block_tokens=[16, 16, 0], usable_blocks=[200, 200, 20])
    (row,) = concurrency(layout, 160, 16, 1)
    # A request takes 10 blocks, at most 4 of the window (32 before, 16 computed, one for the edge), and one state of
    # 8 granules: an extent holds 8 blocks or a state.
    needs = request_blocks(layout, 160, 16, 1)
    assert needs == [10, 4, 1]
    most = max(n for n in range(1, 100) if -(-10 * n // 8) + -(-4 * n // 8) + n <= layout.num_extents)
    assert row.requests == most > 10
    shares = group_shares(layout, 160, 16, 1)
    assert [share.kind for share in shares] == ["full", "sliding", "recurrent"]
    assert sum(share.share for share in shares) == pytest.approx(1)
    assert [share.request_blocks for share in shares] == needs
    assert token_bytes(layout) == 32
    lent = 2 + 1 + 1
    assert request_bytes(layout, 160, 16, 1) == (8 + 8 * lent) * 512


def test_names_of_devices():
    assert {
        "h200",
        "h100",
        "h100-pcie",
        "a100-80g",
        "a100-40g",
        "l40s",
        "l4",
        "rtx-4090",
        "b200",
        "mi300x",
        "cpu",
    } == set(DEVICES)
    assert device_record("H200") is H200
    with pytest.raises(ConfigError, match="did you mean"):
        device_record("h20o")

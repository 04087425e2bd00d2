"""config.json to dimensions: real configurations as vectors, and a typed error for each thing that is not there."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import UnsupportedModelError
from headrace.config.decoder import ARCHITECTURES, Rope, RopeScaling, parse_decoder, parse_rope, yarn_attention_factor

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def parse(**changes):
    return parse_decoder({key: value for key, value in {**BASE, **changes}.items() if value is not ...})


def test_llama_family():
    model = parse()
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert (model.vocab_size, model.hidden_size, model.intermediate_size) == (49152, 576, 1536)
    assert (model.rms_eps, model.ropes) == (1e-5, (Rope(100000.0, 64, RopeScaling()),))
    assert (model.tie_embeddings, model.checkpoint_dtype, model.max_position) == (True, "bfloat16", 8192)
    assert (model.eos_token_ids, model.bos_token_id) == ((2,), 1)
    assert not (model.attention_bias)
    assert not (model.output_bias)
    assert not (model.mlp_bias)
    assert not (model.qk_norm)


def test_qwen2_has_biases_on_q_k_v_only():
    model = parse(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=32768, attention_bias=True
    )
    assert (model.attention_bias, model.output_bias, model.qk_norm) == (True, False, False)


def test_qwen3_normalises_q_and_k_and_has_its_own_head_dim():
    model = parse(architectures=["Qwen3ForCausalLM"], head_dim=128, layer_types=["full_attention"] * 30)
    assert (model.qk_norm, model.attention_bias, model.head_dim) == (True, False, 128)


def test_llama_with_biases():
    model = parse(attention_bias=True, mlp_bias=True)
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == (True, True, True)


def test_defaults_of_missing_keys():
    keys = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "torch_dtype")
    model = parse(
        **dict.fromkeys((*keys, "eos_token_id", "bos_token_id", "max_position_embeddings", "hidden_act"), ...)
    )
    assert (model.num_kv_heads, model.rms_eps, model.ropes[0].theta, model.tie_embeddings) == (9, 1e-6, 10000.0, False)
    assert (model.checkpoint_dtype, model.eos_token_ids, model.bos_token_id, model.max_position) == (
        "float32",
        (),
        None,
        2048,
    )


def test_newer_key_for_the_type_and_a_list_of_ends():
    model = parse(torch_dtype=..., dtype="torch.float16", eos_token_id=[128001, 128009], bos_token_id=None)
    assert (model.checkpoint_dtype, model.eos_token_ids, model.bos_token_id) == ("float16", (128001, 128009), None)


def test_numbers_of_gguf_metadata_may_be_numpy_scalars():
    model = parse(num_attention_heads=np.uint32(9), rms_norm_eps=np.float32(1e-5), eos_token_id=np.uint32(2))
    assert type(model.num_heads) is int
    assert type(model.rms_eps) is float
    assert model.eos_token_ids == (2,)


def test_llama3_scaling_by_the_old_and_the_new_keys():
    theta, scaling = parse_rope({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, 131072)
    assert theta == 500000.0
    assert (scaling.kind, scaling.factor, scaling.original_max_len) == ("llama3", 32.0, 8192)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert parse_rope({"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, 131072) == (theta, scaling)


def test_the_new_keys_win_over_the_old_ones():
    theta, scaling = parse_rope(
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}, 4096
    )
    assert (theta, scaling) == (5e6, RopeScaling())


def test_llama3_does_not_extend_the_stated_length():
    assert parse(rope_scaling=LLAMA3, max_position_embeddings=131072).max_position == 131072


def test_yarn():
    model = parse(rope_scaling=YARN, max_position_embeddings=32768)
    assert (model.ropes[0].scaling.kind, model.ropes[0].scaling.factor, model.ropes[0].scaling.original_max_len) == (
        "yarn",
        4.0,
        32768,
    )
    assert (model.ropes[0].scaling.beta_fast, model.ropes[0].scaling.beta_slow, model.ropes[0].scaling.truncate) == (
        32.0,
        1.0,
        True,
    )
    assert model.max_position == 131072, "yarn extends the trained length"
    assert parse(rope_scaling=YARN, max_position_embeddings=131072).max_position == 131072


def test_yarn_takes_the_original_length_from_the_top_level_or_the_model():
    assert parse_rope({"rope_scaling": {"type": "yarn", "factor": 2}}, 4096)[1].original_max_len == 4096
    config = {"rope_scaling": {"type": "yarn", "factor": 2}, "original_max_position_embeddings": 1024}
    assert parse_rope(config, 4096)[1].original_max_len == 1024


def test_yarn_options():
    raw = {**YARN, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    scaling = parse_rope({"rope_scaling": raw}, 1)[1]
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (16.0, 2.0, False)
    assert yarn_attention_factor(scaling) == 1.5


def test_yarn_factor_on_cos_and_sin():
    assert yarn_attention_factor(RopeScaling("yarn", 4.0)) == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert yarn_attention_factor(RopeScaling("yarn", 1.0)) == 1.0
    both = RopeScaling("yarn", 40.0, mscale=1.0, mscale_all_dim=0.707)
    assert yarn_attention_factor(both) == pytest.approx((0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1))


def test_linear():
    assert parse_rope({"rope_scaling": {"type": "linear", "factor": 2.0}}, 4096)[1] == RopeScaling("linear", 2.0, 4096)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_of_the_list_is_accepted(architecture):
    assert parse(architectures=[architecture]).architecture == architecture


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("value", [..., None, 0, -1, "12", True, 1.5])
def test_a_missing_or_wrong_dimension_is_named(key, value):
    with pytest.raises(UnsupportedModelError, match=key) as caught:
        parse(**{key: value})
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        ({"architectures": []}, "not supported"),
        ({"architectures": None}, "not supported"),
        ({"architectures": 7}, "architecture 7"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "not a multiple"),
        ({"hidden_size": 577}, "head_dim"),
        ({"head_dim": 63}, "odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, "factor"),
        ({"rope_scaling": "yarn"}, "per layer type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding window 4096"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True},
            "sliding window 64",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention",
        ),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"layer_types": 5}, "layer_types"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes, match):
    with pytest.raises(UnsupportedModelError, match=match):
        parse(**changes)


def test_a_mistral_window_as_long_as_the_model_is_full_attention():
    assert parse(architectures=["MistralForCausalLM"], sliding_window=8192).num_layers == 30
    assert parse(architectures=["MistralForCausalLM"], sliding_window=None).num_layers == 30


FAMILY_KEYS = (
    "moe_layers", "mlp_only_layers", "no_rope_layers", "num_experts", "attention_chunk_size", "num_experts_per_tok",
    "sliding_window_pattern", "query_pre_attn_scalar", "hidden_activation", "partial_rotary_factor", "full_attention",
)  # fmt: skip
KEYS = sorted(
    {
        *BASE,
        *LLAMA3,
        *YARN,
        *FAMILY_KEYS,
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "sliding_window",
        "head_dim",
    }
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ARCHITECTURES), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_config_is_parsed_or_refused_with_a_typed_error(architecture, changes):
    try:
        model = parse_decoder({**BASE, "architectures": [architecture], **changes})
    except UnsupportedModelError:
        return
    assert model.num_heads * model.head_dim > 0
    assert model.max_position >= 1

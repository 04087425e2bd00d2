"""The families beside Llama's shape: published configurations as vectors, and what is refused by name."""

import pytest

from headrace.base.errors import UnsupportedModelError
from headrace.config.decoder import DeltaNet, Experts, LayerKind, Rope, RopeScaling, Temperature, parse_decoder

# The dimensions of the published configurations.
GEMMA_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "torch_dtype": "bfloat16",
}
SCOUT = {
    "architectures": ["Llama4ForCausalLM"],
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 10485760,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": [],
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "rms_norm_eps": 1e-5,
}
NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}


def test_gemma3():
    model = parse_decoder(GEMMA_1B)
    assert model.layers[:7] == (*[LayerKind("sliding", 1)] * 5, LayerKind("full", 0), LayerKind("sliding", 1))
    assert model.ropes == (Rope(1e6, 256), Rope(1e4, 256))
    assert (model.window_tokens, model.score_scale, model.embedding_scale) == (512, 0.0625, 1152**0.5)
    assert (model.activation, model.norm_offset, model.qk_norm, model.tie_embeddings) == ("gelu_tanh", 1.0, True, True)
    assert (model.score_cap, model.logit_cap, model.experts, model.delta) == (None, None, None, None)
    assert (model.eos_token_ids, model.bos_token_id) == ((1,), 2)


def test_gemma3_in_the_newer_keys():
    newer = {key: value for key, value in GEMMA_1B.items() if not key.startswith("rope") and "pattern" not in key}
    newer["layer_types"] = ["sliding_attention", "full_attention"] * 13
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = parse_decoder(newer)
    assert model.ropes == (Rope(1e6, 256, RopeScaling("linear", 8.0, 32768)), Rope(1e4, 256))
    assert model.layers[:2] == (LayerKind("sliding", 1), LayerKind("full", 0))


def test_the_scaling_of_gemma3_is_for_the_full_layers():
    model = parse_decoder({**GEMMA_1B, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert [rope.scaling.kind for rope in model.ropes] == ["linear", "none"]


def test_gemma3_caps():
    model = parse_decoder({**GEMMA_1B, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0})
    assert (model.logit_cap, model.score_cap) == (30.0, 50.0)


def test_llama4():
    model = parse_decoder(SCOUT)
    assert model.layers[:4] == (*[LayerKind("chunked", 0, True)] * 3, LayerKind("full", None, True))
    assert model.ropes[0].interleaved
    assert model.ropes[0].scaling.kind == "llama3"
    assert model.experts == Experts(16, 1, 8192, 8192, "sigmoid")
    assert (model.chunk_tokens, model.qk_unit_norm, model.qk_norm) == (8192, True, False)
    assert model.temperature == Temperature(8192, 0.1)
    assert (model.intermediate_size, model.max_position) == (16384, 10485760)


def test_llama4_with_dense_layers_between():
    model = parse_decoder({**SCOUT, "interleave_moe_layer_step": 2, "use_qk_norm": False})
    assert [kind.experts for kind in model.layers[:4]] == [False, True, False, True]
    assert not model.qk_unit_norm
    assert parse_decoder({**SCOUT, "moe_layers": [3]}).layers[3].experts
    assert parse_decoder({**SCOUT, "moe_layers": []}).experts is None


def test_llama4_without_chunks_reads_everything():
    model = parse_decoder({**SCOUT, "attention_chunk_size": None})
    assert {kind.mixer for kind in model.layers} == {"full"}
    assert (model.chunk_tokens, model.layers[0].rope, model.layers[3].rope) == (0, 0, None)


def test_qwen3_next():
    model = parse_decoder(NEXT_80B)
    assert model.layers[:4] == (*[LayerKind("recurrent", None, True)] * 3, LayerKind("full", 0, True))
    assert model.ropes == (Rope(1e7, 64),)
    assert model.delta == DeltaNet(16, 32, 128, 128, 4)
    assert model.experts == Experts(512, 10, 512, 512, "softmax", renormalise=True, shared_gate=True)
    assert (model.attention_gate, model.norm_offset, model.qk_norm) == (True, 1.0, True)


def test_qwen3_next_dense_layers():
    model = parse_decoder({**NEXT_80B, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2})
    assert [kind.experts for kind in model.layers[:6]] == [False, True, False, False, False, True]
    assert parse_decoder({**NEXT_80B, "num_experts": 0}).experts is None


@pytest.mark.parametrize(
    ("base", "changes", "match"),
    [
        (GEMMA_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_1B, {"layer_types": ["chunked_attention"] * 26}, "chunked_attention"),
        (GEMMA_1B, {"layer_types": ["full_attention"]}, "1 layer_types for 26 layers"),
        (GEMMA_1B, {"sliding_window": 0}, "sliding_window"),
        (GEMMA_1B, {"hidden_activation": "relu"}, "hidden_activation relu"),
        (GEMMA_1B, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        (GEMMA_1B, {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        (GEMMA_1B, {"rope_scaling": 5}, "rope_scaling must be an object"),
        (SCOUT, {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        (SCOUT, {"no_rope_layers": ["x"] * 48}, "no_rope_layers"),
        (SCOUT, {"moe_layers": [48]}, "moe_layers names layer 48 of 48"),
        (SCOUT, {"num_experts_per_tok": 17}, "above the 16 experts"),
        (SCOUT, {"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
        (SCOUT, {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48}, "attention_chunk_size"),
        (NEXT_80B, {"linear_num_value_heads": 24}, "not a multiple of linear_num_key_heads"),
        (NEXT_80B, {"partial_rotary_factor": 0.005}, "partial_rotary_factor"),
        (NEXT_80B, {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        (NEXT_80B, {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        (NEXT_80B, {"layer_types": ["mamba"] * 48}, "mamba"),
        (NEXT_80B, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (NEXT_80B, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    ],
)
def test_what_is_not_there_is_refused_by_name(base, changes, match):
    with pytest.raises(UnsupportedModelError, match=match):
        parse_decoder({**base, **changes})

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.base.errors import ModelSourceError, UnsupportedModelError
from headrace.config.decoder import parse_decoder
from headrace.weights.gguf_config import hf_config
from headrace.weights.gguf_file import GgufFile

BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50000.0,
}
EMBEDDING = {"token_embd.weight": np.zeros((10, 64), np.float32)}


def mapped(
    write_gguf: Callable[..., Path],
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    tokens: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    keys = {**BASE, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return hf_config(
        GgufFile(write_gguf({**metadata, **(tokens or {})}, EMBEDDING if tensors is None else tensors, arch=arch))
    )


def test_smollm_becomes_the_published_configuration(smollm_path: Path) -> None:
    decoder = parse_decoder(hf_config(GgufFile(smollm_path)))
    assert (decoder.vocab_size, decoder.hidden_size, decoder.intermediate_size, decoder.num_layers) == (
        49152,
        576,
        1536,
        30,
    )
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, decoder.max_position) == (9, 3, 64, 8192)
    assert (decoder.ropes[0].theta, decoder.tie_embeddings, decoder.eos_token_ids, decoder.bos_token_id) == (
        100000.0,
        True,
        (2,),
        1,
    )
    assert decoder.rms_eps == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("arch", "architecture"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_architectures(write_gguf: Callable[..., Path], arch: str, architecture: str) -> None:
    config = mapped(write_gguf, arch, attention__key_length=32, attention__value_length=32)
    assert config["architectures"] == [architecture]
    assert config["head_dim"] == 32
    assert config["tie_word_embeddings"] is True
    assert parse_decoder(config).head_dim == 32


def test_an_output_matrix_unties_and_biases_are_seen(write_gguf: Callable[..., Path]) -> None:
    tensors = {
        **EMBEDDING,
        "output.weight": np.zeros((10, 64), np.float16),
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
    }
    config = mapped(write_gguf, tensors=tensors)
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_the_float_type_is_the_one_of_the_matrices(write_gguf: Callable[..., Path]) -> None:
    tensors = {"token_embd.weight": np.zeros((10, 64), np.float16), "output_norm.weight": np.ones(64, np.float32)}
    assert mapped(write_gguf, tensors=tensors)["torch_dtype"] == "float16"


def test_several_end_tokens(write_gguf: Callable[..., Path]) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 1}
    assert mapped(write_gguf, tokens=ids)["eos_token_id"] == [3, 5]
    assert mapped(write_gguf, tokens={"tokenizer.ggml.eos_token_id": 3})["eos_token_id"] == 3
    assert mapped(write_gguf)["eos_token_id"] is None


def test_linear_and_yarn_scaling(write_gguf: Callable[..., Path]) -> None:
    linear = mapped(write_gguf, rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert parse_decoder(linear).ropes[0].scaling.kind == "linear"
    yarn = mapped(
        write_gguf, rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=1024
    )
    scaling = parse_decoder(yarn).ropes[0].scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_len, scaling.attention_factor) == (
        "yarn",
        4.0,
        1024,
        None,
    )
    assert "rope_scaling" not in mapped(write_gguf, rope__scaling__type="none")


def llama3_table(factor: float, head_dim: int = 64, theta: float = 500000.0, original: int = 8192) -> np.ndarray:
    """Return what the conversion stores: plain frequencies divided by scaled ones, from transformers' own rule."""
    parameters = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_llama3_table_is_recognised(write_gguf: Callable[..., Path], factor: float) -> None:
    tensors = {**EMBEDDING, "rope_freqs.weight": llama3_table(factor)}
    config = mapped(
        write_gguf, tensors=tensors, rope__freq_base=500000.0, attention__key_length=64, attention__value_length=64
    )
    scaling = parse_decoder(config).ropes[0].scaling
    assert scaling.kind == "llama3"
    assert scaling.factor == pytest.approx(factor, rel=1e-5)
    assert (scaling.original_max_len, scaling.low_freq_factor, scaling.high_freq_factor) == (8192, 1.0, 4.0)


def test_another_table_is_refused_and_ones_mean_nothing(write_gguf: Callable[..., Path]) -> None:
    shape: dict[str, Any] = {"attention__key_length": 64, "attention__value_length": 64}
    with pytest.raises(UnsupportedModelError, match="Llama 3 rule"):
        mapped(write_gguf, tensors={**EMBEDDING, "rope_freqs.weight": np.linspace(1, 2, 32, dtype=np.float32)}, **shape)
    with pytest.raises(UnsupportedModelError, match=r"expected F32 \[32\]"):
        mapped(write_gguf, tensors={**EMBEDDING, "rope_freqs.weight": np.ones(16, np.float32)}, **shape)
    assert "rope_scaling" not in mapped(
        write_gguf, tensors={**EMBEDDING, "rope_freqs.weight": np.ones(32, np.float32)}, **shape
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"embedding_length": None}, "no llama.embedding_length"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"attention__value_length": 8}, "different length"),
        ({"rope__dimension_count": 8}, "a part of the head"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"attention__head_count_kv": [2, 1]}, "differs between layers"),
    ],
)
def test_refusals_name_the_cause(write_gguf: Callable[..., Path], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        mapped(write_gguf, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_count": "two"},
        {"block_count": 0},
        {"attention__head_count": [0, 0]},
        {"attention__layer_norm_rms_epsilon": float("nan")},
        {"rope__freq_base": "x"},
        {"embedding_length": 1.5},
    ],
)
def test_values_of_another_kind_are_model_source_errors(
    write_gguf: Callable[..., Path], changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelSourceError, match="number is expected"):
        mapped(write_gguf, **changes)


def test_another_architecture_is_refused(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="'gemma2' is not supported"):
        hf_config(GgufFile(write_gguf({}, EMBEDDING, arch="gemma2")))


def test_equal_numbers_for_each_layer_count_as_one(write_gguf: Callable[..., Path]) -> None:
    assert mapped(write_gguf, attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2


def test_gemma3(write_gguf: Callable[..., Path]) -> None:
    config = mapped(write_gguf, "gemma3", rope__freq_base=1e6, attention__sliding_window=512, block_count=7)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["sliding_window"], config["query_pre_attn_scalar"], config["tie_word_embeddings"]) == (512, 16, True)
    decoder = parse_decoder(config)
    assert [kind.mixer for kind in decoder.layers] == ["sliding"] * 5 + ["full", "sliding"]
    assert [rope.theta for rope in decoder.ropes] == [1e6, 1e4]


def test_what_a_gemma3_file_may_say(write_gguf: Callable[..., Path]) -> None:
    config = mapped(
        write_gguf, "gemma3", attention__sliding_window=64, block_count=3, final_logit_softcapping=30.0,
        attention__sliding_window_pattern=[True, False, True], rope__scaling__type="linear", rope__scaling__factor=8.0,
        rope__freq_base_swa=500.0,
    )  # fmt: skip
    decoder = parse_decoder(config)
    assert [kind.mixer for kind in decoder.layers] == ["sliding", "full", "sliding"]
    assert [(rope.theta, rope.scaling.kind) for rope in decoder.ropes] == [(50000.0, "linear"), (500.0, "none")]
    assert decoder.logit_cap == 30.0


def test_the_largest_gemma3_has_another_scale(write_gguf: Callable[..., Path]) -> None:
    keys = {"attention__sliding_window": 64, "attention__key_length": 32, "attention__value_length": 32}
    assert mapped(write_gguf, "gemma3", block_count=62, **keys)["query_pre_attn_scalar"] == 64 // 4
    assert mapped(write_gguf, "gemma3", block_count=34, **keys)["query_pre_attn_scalar"] == 32


def test_a_gemma3_file_without_its_window_is_refused(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        mapped(write_gguf, "gemma3")

"""The dimensions of a dense decoder, parsed from the keys of a Hugging Face ``config.json``.

Pure: takes the parsed JSON. GGUF metadata is mapped to the same keys by ``weights``, so nothing above knows formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import UnsupportedModelError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies.

    Attributes:
        kind: "none", "linear", "llama3" or "yarn".
        factor: extension factor.
        original_max_len: length the model was trained for before scaling.
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only.
        attention_factor: yarn: multiplies cos and sin; None means the default ``0.1 ln(factor) + 1``.
        beta_fast: yarn.
        beta_slow: yarn.
        mscale: yarn (DeepSeek style), or None.
        mscale_all_dim: yarn (DeepSeek style), or None.
        truncate: yarn: round the correction range to whole dimensions.
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and switches of a dense decoder; all counts are of the whole model, not of a rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position: int
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that `parse_decoder` accepts. `models.registry` must have an entry for each."""


def parse_decoder(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the dimensions of a decoder.

    Args:
        config: parsed ``config.json``.

    Returns:
        The dimensions.

    Raises:
        UnsupportedModelError: unknown architecture, activation, sliding window in use, or rope scaling; a missing key.
    """
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}", param="architectures"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation} is not supported for {architecture}; only silu is", param="hidden_act")
    _refuse_sliding_window(config, architecture)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    heads = int(_need(config, "num_attention_heads"))
    hidden = int(_need(config, "hidden_size"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnsupportedModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = int(config.get("head_dim") or hidden // heads)
    bias = bool(config.get("attention_bias", False))
    max_position = int(config.get("max_position_embeddings") or 2048)
    theta, scaling = parse_rope(config, max_position)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(_need(config, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_need(config, "intermediate_size")),
        num_layers=int(_need(config, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=max_position,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=True if qwen2 else bias,
        output_bias=False if qwen2 else bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qwen3,
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_ids(config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
    )


def parse_rope(config: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling]:
    """Return (theta, scaling) from either the old keys (rope_theta, rope_scaling) or the new one (rope_parameters).

    Raises:
        UnsupportedModelError: a scaling type that is not implemented.
    """
    raw: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn", param="rope_scaling")
    if float(config.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported", param="partial_rotary_factor")
    factor = float(raw.get("factor") or 1.0)
    original = int(raw.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or max_position)
    return theta, RopeScaling(
        kind=kind,
        factor=factor,
        original_max_len=original,
        low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
        high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
        attention_factor=raw.get("attention_factor"),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        mscale=raw.get("mscale"),
        mscale_all_dim=raw.get("mscale_all_dim"),
        truncate=bool(raw.get("truncate", True)),
    )


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Return the factor on cos and sin (arXiv 2309.00071, and its DeepSeek variant with mscale)."""
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)

    def get_mscale(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return get_mscale(scaling.factor, scaling.mscale) / get_mscale(scaling.factor, scaling.mscale_all_dim)
    return get_mscale(scaling.factor)


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str) -> None:
    types = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in types):
        raise UnsupportedModelError(f"{architecture} with layer types {sorted(set(types))} is not supported; only full attention is")
    window = config.get("sliding_window")
    if architecture == "MistralForCausalLM" and window and window < int(config.get("max_position_embeddings") or 0):
        raise UnsupportedModelError(f"sliding window {window} is not supported yet", param="sliding_window")
    if config.get("use_sliding_window") and window:
        raise UnsupportedModelError(f"sliding window {window} is not supported yet", param="use_sliding_window")


def _need(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key}", param=key)
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)

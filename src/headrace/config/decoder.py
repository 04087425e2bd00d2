"""The dimensions of a dense decoder, parsed from the keys of a Hugging Face ``config.json``.

Pure: takes the parsed JSON. GGUF metadata is mapped to the same keys by ``weights``, so nothing above knows formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
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
        UnsupportedModelError: unknown architecture, activation, sliding window in use, or rope scaling; a missing key
            or one of a wrong type.
    """
    architecture = _architecture(config)
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act {activation} is not supported for {architecture}; only silu is", param="hidden_act"
        )
    _refuse_sliding_window(config, architecture)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    heads, kv_heads, head_dim = _heads(config)
    bias = _switch(config, "attention_bias")
    max_position = _count(config, "max_position_embeddings", 2048)
    theta, scaling = parse_rope(config, max_position)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=_count(config, "hidden_size"),
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=_extended_length(scaling, max_position),
        tie_embeddings=_switch(config, "tie_word_embeddings"),
        attention_bias=True if qwen2 else bias,
        output_bias=False if qwen2 else bias,
        mlp_bias=_switch(config, "mlp_bias"),
        qk_norm=qwen3,
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_ids(config, "eos_token_id"),
        bos_token_id=next(iter(_ids(config, "bos_token_id")), None),
    )


def parse_rope(config: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling]:
    """Read the rotary embedding from either the old keys (rope_theta, rope_scaling) or the new one (rope_parameters).

    Args:
        config: parsed ``config.json``.
        max_position: ``max_position_embeddings``, the original length where the scaling gives none.

    Returns:
        Theta and the scaling.

    Raises:
        UnsupportedModelError: a scaling type that is not implemented, or one without its parameters.
    """
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping) or any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModelError("rope parameters per layer type are not supported", param="rope_parameters")
    partial = {"partial_rotary_factor": config.get("partial_rotary_factor"), **raw}
    if _positive(partial, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "partial_rotary_factor other than 1 is not supported", param="partial_rotary_factor"
        )
    theta = _positive({"rope_theta": config.get("rope_theta"), **raw}, "rope_theta", 10000.0)
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn", param="rope_scaling"
        )
    original = _count({**config, **raw}, "original_max_position_embeddings", max_position)
    return theta, RopeScaling(
        kind=kind,
        factor=_positive(raw, "factor"),
        original_max_len=original,
        low_freq_factor=_positive(raw, "low_freq_factor", 1.0),
        high_freq_factor=_positive(raw, "high_freq_factor", 4.0),
        attention_factor=_positive_or_none(raw, "attention_factor"),
        beta_fast=_positive(raw, "beta_fast", 32.0),
        beta_slow=_positive(raw, "beta_slow", 1.0),
        mscale=_positive_or_none(raw, "mscale"),
        mscale_all_dim=_positive_or_none(raw, "mscale_all_dim"),
        truncate=_switch(raw, "truncate", default=True),
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


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else names
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}", param="architectures"
        )
    return str(name)


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (query heads, KV heads, elements of a head)."""
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            param="num_key_value_heads",
        )
    hidden = _count(config, "hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no head_dim",
            param="head_dim",
        )
    head_dim = _count(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd; rotary embedding needs pairs", param="head_dim")
    return heads, kv_heads, head_dim


def _extended_length(scaling: RopeScaling, max_position: int) -> int:
    # A yarn config often keeps the trained length in max_position_embeddings; the scaling is what extends it. The
    # other kinds are written with the extended length already.
    if scaling.kind != "yarn":
        return max_position
    return max(max_position, round(scaling.original_max_len * scaling.factor))


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str) -> None:
    types = config.get("layer_types")
    if types is None:
        types = []
    if not isinstance(types, list | tuple):
        raise UnsupportedModelError(f"config.json: layer_types must be a list, got {types!r}", param="layer_types")
    if any(kind != "full_attention" for kind in types):
        raise UnsupportedModelError(
            f"{architecture} with layer types {sorted({str(kind) for kind in types})} is not supported; "
            "only full attention is",
            param="layer_types",
        )
    if config.get("sliding_window") is None:
        return
    window = _count(config, "sliding_window")
    # Mistral applies its window whenever there is one; Qwen only with use_sliding_window; Llama has none.
    if architecture == "MistralForCausalLM" and window < _count(config, "max_position_embeddings", 2048):
        raise UnsupportedModelError(f"sliding window {window} is not supported yet", param="sliding_window")
    if _switch(config, "use_sliding_window"):
        raise UnsupportedModelError(f"sliding window {window} is not supported yet", param="use_sliding_window")


def _is(value: Any, kind: type[Any]) -> bool:
    # Asked with Integral and Real, since numbers from GGUF metadata may be numpy's. True is no number.
    return isinstance(value, kind) and not isinstance(value, bool)


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key}", param=key)
    if not _is(value, Integral) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} must be a positive integer, got {value!r}", param=key)
    return int(value)


def _switch(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    # numpy's bool comes from GGUF metadata; a text such as "false" would count as true.
    if not isinstance(value, bool) and type(value).__name__ != "bool":
        raise UnsupportedModelError(f"config.json: {key} must be true or false, got {value!r}", param=key)
    return bool(value)


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key}", param=key)
    if not _is(value, Real) or not 0 < value < 1e30:
        raise UnsupportedModelError(f"config.json: {key} must be a positive number, got {value!r}", param=key)
    return float(value)


def _positive_or_none(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _positive(config, key)


def _ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    items = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in items:
        if not _is(item, Integral) or item < 0:
            raise UnsupportedModelError(f"config.json: {key} must be a token id, got {item!r}", param=key)
    return tuple(int(item) for item in items)

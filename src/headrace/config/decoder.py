"""The dimensions of a decoder, parsed from the keys of a Hugging Face ``config.json``.

Pure: takes the parsed JSON. GGUF metadata is mapped to the same keys by ``weights``, so nothing above knows formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.base.errors import UnsupportedModelError
from headrace.config.decoder_keys import count, layer_list, positive, switch, token_ids
from headrace.config.decoder_types import DecoderConfig, DeltaNet, Experts, LayerKind, Mixer, Temperature
from headrace.config.families import FAMILIES
from headrace.config.rope import Rope, RopeScaling, extended_length, parse_rope, yarn_attention_factor

__all__ = [
    "ARCHITECTURES",
    "DecoderConfig",
    "DeltaNet",
    "Experts",
    "LayerKind",
    "Mixer",
    "Rope",
    "RopeScaling",
    "Temperature",
    "parse_decoder",
    "parse_rope",
    "yarn_attention_factor",
]

_MAX_LAYERS = 100_000
_PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

ARCHITECTURES: tuple[str, ...] = (*_PLAIN, *FAMILIES)
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
    family = FAMILIES.get(architecture)
    if family is None:
        return _plain(config, architecture)
    config = {**family.defaults, **config}
    return family.extend(config, _common(config, architecture))


def _plain(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Read a decoder of Llama's shape: one kind of layer, one rotary embedding."""
    _refuse_sliding_window(config, architecture)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    found = _common(config, architecture)
    theta, scaling = parse_rope(config, found.max_position)
    return replace(
        found,
        ropes=(Rope(theta, found.head_dim, scaling),),
        max_position=extended_length(scaling, found.max_position),
        attention_bias=True if qwen2 else found.attention_bias,
        output_bias=False if qwen2 else found.output_bias,
        qk_norm=qwen3,
    )


def _common(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Read what all decoders have; the rotary embeddings are for the family to set."""
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    activation = config.get(key) or "silu"
    if activation not in ("silu", "swish", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(
            f"{key} {activation} is not supported for {architecture}; silu and gelu_pytorch_tanh are", param=key
        )
    heads, kv_heads, head_dim = _heads(config)
    bias = switch(config, "attention_bias")
    layers = count(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise UnsupportedModelError(f"config.json: {layers} layers are too many", param="num_hidden_layers")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        intermediate_size=count(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=positive(config, "rms_norm_eps", 1e-6),
        ropes=(),
        layers=(LayerKind(),) * layers,
        max_position=count(config, "max_position_embeddings", 2048),
        tie_embeddings=switch(config, "tie_word_embeddings"),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=switch(config, "mlp_bias"),
        qk_norm=False,
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=token_ids(config, "eos_token_id"),
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        score_scale=head_dim**-0.5,
        activation="gelu_tanh" if activation == "gelu_pytorch_tanh" else "silu",
    )


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
    heads = count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            param="num_key_value_heads",
        )
    hidden = count(config, "hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no head_dim",
            param="head_dim",
        )
    head_dim = count(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd; rotary embedding needs pairs", param="head_dim")
    return heads, kv_heads, head_dim


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str) -> None:
    types = layer_list(config, "layer_types") or []
    if any(kind != "full_attention" for kind in types):
        raise UnsupportedModelError(
            f"{architecture} with layer types {sorted({str(kind) for kind in types})} is not supported; "
            "only full attention is",
            param="layer_types",
        )
    if config.get("sliding_window") is None:
        return
    window = count(config, "sliding_window")
    # Mistral applies its window whenever there is one; Qwen only with use_sliding_window; Llama has none.
    if architecture == "MistralForCausalLM" and window < count(config, "max_position_embeddings", 2048):
        raise UnsupportedModelError(f"sliding window {window} is not supported yet", param="sliding_window")
    if switch(config, "use_sliding_window"):
        raise UnsupportedModelError(f"sliding window {window} is not supported yet", param="use_sliding_window")

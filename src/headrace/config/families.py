"""What families other than Llama's shape add to a decoder: kinds of layers, windows, experts, recurrent layers.

One function a family, from the keys of ``config.json``; the defaults are those of the family's class in
``transformers``. What a model asks for and Headrace has not is refused by the name of its key. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.base.errors import UnsupportedModelError
from headrace.config.decoder_keys import count, layer_list, positive, positive_or_none, switch
from headrace.config.decoder_types import DecoderConfig, DeltaNet, Experts, LayerKind, Mixer, Temperature
from headrace.config.rope import Rope, extended_length, parse_rope


@dataclass(frozen=True)
class Family:
    """How a family is read.

    Attributes:
        defaults: of keys that a config may leave out.
        extend: takes the config with the defaults, and what all decoders have; returns the whole.
    """

    defaults: Mapping[str, Any]
    extend: Callable[[Mapping[str, Any], DecoderConfig], DecoderConfig]


def _gemma3(config: Mapping[str, Any], found: DecoderConfig) -> DecoderConfig:
    if switch(config, "use_bidirectional_attention"):
        raise UnsupportedModelError(
            "use_bidirectional_attention is not supported; only causal attention is",
            param="use_bidirectional_attention",
        )
    pattern = count(config, "sliding_window_pattern", count(config, "_sliding_window_pattern", 6))
    types = _layer_types(config, found, ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
                                         for i in range(found.num_layers)],
                         {"full_attention": "full", "sliding_attention": "sliding"})  # fmt: skip
    raw = config.get("rope_parameters")
    if isinstance(raw, Mapping) and {"full_attention", "sliding_attention"} & set(raw):
        parts = [_mapping(raw, kind) for kind in ("full_attention", "sliding_attention")]
    else:
        parts = [
            {"rope_theta": config.get("rope_theta"), **_mapping(config, "rope_scaling")},
            {"rope_theta": config.get("rope_local_base_freq")},
        ]
    ropes = []
    for part, theta in zip(parts, (1_000_000.0, 10_000.0), strict=True):
        stated = {key: value for key, value in part.items() if value is not None}
        base, scaling = parse_rope({"rope_parameters": {"rope_theta": theta, **stated}}, found.max_position)
        ropes.append(Rope(base, found.head_dim, scaling))
    return replace(
        found,
        ropes=tuple(ropes),
        layers=tuple(LayerKind(kind, 0 if kind == "full" else 1) for kind in types),
        max_position=extended_length(ropes[0].scaling, found.max_position),
        mlp_bias=False,
        score_scale=positive(config, "query_pre_attn_scalar") ** -0.5,
        qk_norm=True,
        window_tokens=count(config, "sliding_window") if "sliding" in types else 0,
        score_cap=positive_or_none(config, "attn_logit_softcapping"),
        logit_cap=positive_or_none(config, "final_logit_softcapping"),
        norm_offset=1.0,
        norms_after=True,
        embedding_scale=found.hidden_size**0.5,
    )


def _llama4(config: Mapping[str, Any], found: DecoderConfig) -> DecoderConfig:
    layers = found.num_layers
    interval = count(config, "no_rope_layer_interval", 4)
    turned = layer_list(config, "no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(turned) < layers or any(value not in (0, 1) for value in turned):
        raise UnsupportedModelError(
            f"config.json: no_rope_layers must have a 0 or 1 for each of {layers} layers", param="no_rope_layers"
        )
    chunk = 0 if config.get("attention_chunk_size") is None else count(config, "attention_chunk_size")
    usual = ["chunked_attention" if turned[i] and chunk else "full_attention" for i in range(layers)]
    types = _layer_types(config, found, usual, {"full_attention": "full", "chunked_attention": "chunked"})
    if "chunked" in types and not chunk:
        raise UnsupportedModelError("chunked attention without attention_chunk_size", param="attention_chunk_size")
    step = count(config, "interleave_moe_layer_step", 1)
    listed = layer_list(config, "moe_layers")
    mixed = set(range(step - 1, layers, step)) if listed is None else {_index(i, layers, "moe_layers") for i in listed}
    theta, scaling = parse_rope({"rope_theta": 500_000.0, **_without_none(config, "rope_theta")}, found.max_position)
    temperature = None
    if switch(config, "attn_temperature_tuning", default=True):
        temperature = Temperature(count(config, "floor_scale", 8192), positive(config, "attn_scale", 0.1))
    experts = Experts(
        count=count(config, "num_local_experts"),
        top_k=count(config, "num_experts_per_tok"),
        intermediate_size=found.intermediate_size,
        shared_intermediate_size=found.intermediate_size,
        router="sigmoid",
    )
    return replace(
        found,
        intermediate_size=count(config, "intermediate_size_mlp"),
        ropes=(Rope(theta, found.head_dim, scaling, interleaved=True),),
        layers=tuple(LayerKind(kind, 0 if turned[i] else None, i in mixed) for i, kind in enumerate(types)),
        max_position=extended_length(scaling, found.max_position),
        mlp_bias=False,
        qk_unit_norm=switch(config, "use_qk_norm", default=True),
        chunk_tokens=chunk if "chunked" in types else 0,
        temperature=temperature,
        experts=_checked(experts) if mixed else None,
    )


def _qwen3_next(config: Mapping[str, Any], found: DecoderConfig) -> DecoderConfig:
    if found.activation != "silu":
        raise UnsupportedModelError(f"hidden_act of {found.architecture} must be silu", param="hidden_act")
    layers, interval = found.num_layers, count(config, "full_attention_interval", 4)
    usual = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    types = _layer_types(config, found, usual, {"full_attention": "full", "linear_attention": "recurrent"})
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    raw = dict(raw) if isinstance(raw, Mapping) else {"": raw}
    share = positive({**config, **raw}, "partial_rotary_factor", 0.25)
    raw.pop("partial_rotary_factor", None)
    dim = int(found.head_dim * share)
    if share > 1 or dim < 2 or dim % 2:
        raise UnsupportedModelError(
            f"partial_rotary_factor {share} of head_dim {found.head_dim} is not an even part of it",
            param="partial_rotary_factor",
        )
    theta, scaling = parse_rope({**config, "rope_parameters": raw, "partial_rotary_factor": None}, found.max_position)
    delta = DeltaNet(
        key_heads=count(config, "linear_num_key_heads"),
        value_heads=count(config, "linear_num_value_heads"),
        key_dim=count(config, "linear_key_head_dim"),
        value_dim=count(config, "linear_value_head_dim"),
        conv_tokens=count(config, "linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads {delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}",
            param="linear_num_value_heads",
        )
    if delta.conv_tokens < 2:
        raise UnsupportedModelError("linear_conv_kernel_dim must be at least 2", param="linear_conv_kernel_dim")
    mixed = _mixed_layers(config, layers)
    experts = Experts(
        count=count(config, "num_experts"),
        top_k=count(config, "num_experts_per_tok"),
        intermediate_size=count(config, "moe_intermediate_size"),
        shared_intermediate_size=count(config, "shared_expert_intermediate_size"),
        router="softmax",
        renormalise=switch(config, "norm_topk_prob", default=True),
        shared_gate=True,
    ) if mixed else None  # fmt: skip
    return replace(
        found,
        ropes=(Rope(theta, dim, scaling),),
        layers=tuple(
            LayerKind(kind, 0 if kind == "full" else None, index in mixed) for index, kind in enumerate(types)
        ),
        max_position=extended_length(scaling, found.max_position),
        mlp_bias=False,
        qk_norm=True,
        attention_gate=True,
        norm_offset=1.0,
        experts=None if experts is None else _checked(experts),
        delta=delta if "recurrent" in types else None,
    )


def _mixed_layers(config: Mapping[str, Any], layers: int) -> set[int]:
    """Return the layers whose MLP is a mixture of experts."""
    if config.get("num_experts") == 0:
        return set()
    dense = {_index(i, layers, "mlp_only_layers") for i in layer_list(config, "mlp_only_layers") or []}
    step = count(config, "decoder_sparse_step", 1)
    return {i for i in range(layers) if (i + 1) % step == 0 and i not in dense}


def _layer_types(
    config: Mapping[str, Any], found: DecoderConfig, usual: list[str], known: Mapping[str, Mixer]
) -> list[Mixer]:
    """Return the mixer of each layer, from ``layer_types`` or else the family's usual order."""
    types = layer_list(config, "layer_types") or usual
    if len(types) != found.num_layers:
        raise UnsupportedModelError(
            f"config.json: {len(types)} layer_types for {found.num_layers} layers", param="layer_types"
        )
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported for {found.architecture}; supported: {', '.join(known)}",
                param="layer_types",
            )
    return [known[kind] for kind in types]


def _checked(experts: Experts) -> Experts:
    if experts.top_k > experts.count:
        raise UnsupportedModelError(
            f"num_experts_per_tok {experts.top_k} is above the {experts.count} experts", param="num_experts_per_tok"
        )
    return experts


def _index(value: Any, layers: int, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < layers:
        raise UnsupportedModelError(f"config.json: {key} names layer {value!r} of {layers}", param=key)
    return value


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config.json: {key} must be an object, got {value!r}", param=key)
    return value


def _without_none(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the config without a key whose value is null, so that a default can stand in for it."""
    return {name: value for name, value in config.items() if name != key or value is not None}


FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": Family(
        {
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
        _gemma3,
    ),
    "Llama4ForCausalLM": Family(
        {
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
        },
        _llama4,
    ),
    "Qwen3NextForCausalLM": Family(
        {
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "max_position_embeddings": 32768,
        },
        _qwen3_next,
    ),
}
"""Families by architecture."""

"""Maps the metadata of a GGUF file to the keys of a Hugging Face ``config.json``, so that nothing above knows formats.

Sources: the key names of the GGUF specification, and llama.cpp's conversion script for what each of them means. Must
not import torch, and must not read tensors other than the small table of rope factors.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from headrace.base.errors import ModelSourceError, UnsupportedModelError
from headrace.weights.gguf_file import GgufFile, StringArray

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""``general.architecture`` -> (architecture, model_type)."""

ROPE_FACTORS = "rope_freqs.weight"
_MAX_COUNT = 1 << 40
_FLOAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the file's dimensions under the names of ``config.json``.

    Raises:
        UnsupportedModelError: another architecture, a missing key, or a feature that is not implemented.
    """
    arch = gguf.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.path}: architecture {arch!r} is not supported; supported in GGUF: {', '.join(ARCHITECTURES)}",
            param="architectures",
        )
    keys = _Keys(gguf, str(arch))
    architecture, model_type = ARCHITECTURES[str(arch)]
    if keys.get("expert_count", 0):
        raise UnsupportedModelError(
            f"{gguf.path}: mixture-of-experts models are not supported yet", param="architectures"
        )
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{gguf.path}: keys and values of different length are not supported")
    if keys.count("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{gguf.path}: rotary embedding on a part of the head is not supported")
    context = keys.count("context_length", 2048)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(gguf, keys),
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "torch_dtype": _float_name(gguf),
        "bos_token_id": _token_id(gguf, "bos_token_id"),
        "eos_token_id": _end_ids(gguf),
    }
    scaling = _rope_scaling(gguf, keys, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _gemma3(keys, config) if arch == "gemma3" else config


_GEMMA3_27B_LAYERS = 62


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return what Gemma 3 has beyond the others.

    The files have neither the pattern of windows nor the theta of windowed layers nor the scalar of the queries:
    llama.cpp has them in its code, where the largest model alone is scaled by hidden size over heads. A rope scaling is
    for the full layers, as in ``config.json``.
    """
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": config["head_dim"],
    }
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    else:
        found["sliding_window_pattern"] = keys.count("attention.sliding_window_pattern", 6)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if keys.get(name) is not None:
            found[name] = keys.number(name)
    return found


class _Keys:
    """Access to the keys of one architecture."""

    def __init__(self, gguf: GgufFile, arch: str) -> None:
        self._metadata, self._arch, self._path = gguf.metadata, arch, gguf.path

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._arch}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; without a default it must be there.

        Raises:
            UnsupportedModelError: missing.
            ModelSourceError: not a finite number.
        """
        value = self.get(name, default)
        if value is None:
            raise UnsupportedModelError(f"{self._path}: the metadata has no {self._arch}.{name}")
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelSourceError(
                f"{self._path}: {self._arch}.{name} is {value!r}, a number is expected", param="model"
            )
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number. Some files give it for each layer; then all must be the same."""
        value = self.get(name)
        if isinstance(value, list) and value:
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self._path}: {self._arch}.{name} differs between layers, which is not supported"
                )
            value = value[0]
        elif value is None:
            value = self.number(name, default)
        if not isinstance(value, int | float) or not 0 < value < _MAX_COUNT or value != int(value):
            raise ModelSourceError(
                f"{self._path}: {self._arch}.{name} is {value!r}, a positive number is expected", param="model"
            )
        return int(value)


def _vocab_size(gguf: GgufFile, keys: _Keys) -> int:
    # The rows of the embedding decide: the list of tokens may be shorter than the padded matrix.
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, StringArray) and len(tokens) else keys.count("vocab_size")


def _end_ids(gguf: GgufFile) -> list[int] | int | None:
    found = [_token_id(gguf, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    unique = list(dict.fromkeys(item for item in found if item is not None))
    return unique[0] if len(unique) == 1 else unique or None


def _token_id(gguf: GgufFile, name: str) -> int | None:
    value = gguf.metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float_name(gguf: GgufFile) -> str:
    """Name the float type of the matrices; quantised ones count as float32, which holds their values exactly."""
    kinds = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    return _FLOAT_NAMES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _rope_scaling(gguf: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any] | None:
    kind, context = str(keys.get("rope.scaling.type", "none")), config["max_position_embeddings"]
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0) or 1.0
    original = int(keys.number("rope.scaling.original_context_length", 0))
    if ROPE_FACTORS in gguf.tensors:
        if kind not in ("none", "llama3"):
            raise UnsupportedModelError(
                f"{gguf.path}: {ROPE_FACTORS} together with rope scaling {kind!r} is not supported"
            )
        return _llama3_scaling(gguf, config, original)
    if any(name.startswith("rope_factors_") for name in gguf.tensors):
        raise UnsupportedModelError(
            f"{gguf.path}: long-context rope factor tables are not supported", param="rope_scaling"
        )
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise UnsupportedModelError(f"{gguf.path}: rope scaling {kind!r} is not supported; supported: linear, yarn")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or round(context / factor),
    }
    if keys.get("rope.scaling.attn_factor") is not None:
        # llama.cpp multiplies its own yarn factor by this one; config.json has the product.
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3_scaling(gguf: GgufFile, config: dict[str, Any], original: int) -> dict[str, Any] | None:
    """Recognise the Llama 3 rule in a table of factors.

    llama.cpp's conversion replaces the rule's parameters by the factor it gives for each frequency. All released models
    use 1, 4 and 8192 for the low and high factor and the original length, so the largest factor tells the rest.

    Raises:
        UnsupportedModelError: the table follows another rule.
    """
    tensor = gguf.tensors[ROPE_FACTORS]
    half, theta = config["head_dim"] // 2, config["rope_theta"]
    if tensor.type.name != "F32" or tensor.shape != (half,):
        raise UnsupportedModelError(
            f"{gguf.path}: {ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}, expected F32 [{half}]"
        )
    factors = struct.unpack(f"<{half}f", gguf.raw(ROPE_FACTORS).tobytes())
    factor = float(max(factors))
    if all(value == 1.0 for value in factors):
        return None
    original = original or 8192
    for position, value in enumerate(factors):
        expected = _llama3_factor(2.0 * math.pi * theta ** (2.0 * position / config["head_dim"]), factor, original)
        if not math.isclose(value, expected, rel_tol=1e-4):
            raise UnsupportedModelError(
                f"{gguf.path}: {ROPE_FACTORS} does not follow the Llama 3 rule (factor {position} is {value:g}, "
                f"expected {expected:g}); other tables are not supported",
                param="rope_scaling",
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def _llama3_factor(wave_length: float, factor: float, original: int) -> float:
    """Return what a frequency is divided by; low and high factor are 1 and 4 (Llama 3.1's rope rule)."""
    if wave_length < original / 4.0:
        return 1.0
    if wave_length > original:
        return factor
    smooth = (original / wave_length - 1.0) / 3.0
    return 1.0 / ((1.0 - smooth) / factor + smooth)

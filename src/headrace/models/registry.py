"""Maps an architecture name to its class, importing the module only when it is asked for."""

from __future__ import annotations

import importlib

from headrace.base.errors import UnsupportedModelError
from headrace.config.decoder import DecoderConfig
from headrace.layers.context import ModelContext
from headrace.models.decoder import CausalModel

__all__ = ["MODULES", "CausalModel", "ModelContext", "build_model", "model_class"]

MODULES: dict[str, str] = {
    "Gemma3ForCausalLM": "headrace.models.gemma3",
    "Llama4ForCausalLM": "headrace.models.llama4",
    "LlamaForCausalLM": "headrace.models.llama",
    "MistralForCausalLM": "headrace.models.mistral",
    "Qwen2ForCausalLM": "headrace.models.qwen2",
    "Qwen3ForCausalLM": "headrace.models.qwen3",
    "Qwen3NextForCausalLM": "headrace.models.qwen3_next",
}
"""Module of each architecture; the class in it has the architecture's name."""


def model_class(architecture: str) -> type[CausalModel]:
    """Return the class of an architecture.

    Raises:
        UnsupportedModelError: not in `MODULES`.
    """
    module = MODULES.get(architecture)
    if module is None:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported: {', '.join(MODULES)}", param="architectures"
        )
    found: type[CausalModel] = getattr(importlib.import_module(module), architecture)
    return found


def build_model(decoder: DecoderConfig, context: ModelContext) -> CausalModel:
    """Build a model with empty parameters.

    Args:
        decoder: dimensions.
        context: type, device, ranks, quantization, attention backend.

    Raises:
        UnsupportedModelError: unknown architecture.
        ConfigError: the context cannot be served, or the dimensions do not split over the ranks.
    """
    return model_class(decoder.architecture)(decoder, context)

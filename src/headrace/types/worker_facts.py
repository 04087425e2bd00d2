"""What a worker reports once its weights are loaded: the facts from which the engine sizes the KV cache."""

from __future__ import annotations

import msgspec

from headrace.types.cache_specs import LayerCache
from headrace.types.wire import PhaseSeconds


class WorkerFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of one rank after loading.

    Attributes:
        layer_caches: what each layer keeps, on this rank.
        cache_bytes: bytes that this rank may use for the KV cache.
        vocab_tokens: width of the logits.
        max_position: longest sequence the model was made for, in tokens.
        parameter_bytes: bytes of the weights on this rank.
        dtype: type of weights and activations.
        device: where the model runs.
        attention_backend: name of the attention implementation.
        phases: seconds of each part of loading, in order.
    """

    layer_caches: list[LayerCache]
    cache_bytes: int
    vocab_tokens: int
    max_position: int
    parameter_bytes: int
    dtype: str
    device: str
    attention_backend: str
    phases: list[PhaseSeconds] = []

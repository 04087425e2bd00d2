"""Bytes of a decoder's parameters, activations, logits and KV cache on one rank, from its dimensions alone.

Arithmetic only, from the shapes that ``models`` builds: must not import torch or read weights.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec

from headrace.base.errors import UnsupportedModelError
from headrace.config import ModelConfig
from headrace.config.decoder import DecoderConfig
from headrace.engine.layer_bytes import LayerShape
from headrace.platforms.devices import DeviceRecord
from headrace.types.cache_specs import LayerCache
from headrace.worker.placement import choose_quantization

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class WeightBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the parameters on one rank."""

    embedding: int
    layers: int
    head: int

    @property
    def total(self) -> int:
        """Bytes of all parameters on one rank."""
        return self.embedding + self.layers + self.head


@dataclasses.dataclass(frozen=True)
class Formats:
    """How the engine would hold a model; the rules are those of ``--dtype`` and ``--quantization``.

    Attributes:
        dtype: of the activations, and of the KV cache unless the linears are int8.
        int8: linears are int8.
        packed: linears are packed copies (CPU), so a tied head takes memory of its own.
    """

    dtype: str
    int8: bool = False
    packed: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the activations."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def cache_dtype(self) -> str:
        """Type of the KV cache; the rule of `layers.context.cache_dtype`."""
        return "bfloat16" if self.int8 else self.dtype

    @property
    def cache_element_bytes(self) -> int:
        """Bytes of one element of the KV cache."""
        return _ELEMENT_BYTES[self.cache_dtype]

    @property
    def weight_format(self) -> str:
        """Name of what the linears are stored in."""
        return "int8" if self.int8 else self.dtype


def choose_formats(decoder: DecoderConfig, device: DeviceRecord, model: ModelConfig, *, quantized: bool) -> Formats:
    """Return the element types on a device.

    Args:
        decoder: has the checkpoint's type.
        device: where it runs.
        model: ``dtype`` and ``quantization``.
        quantized: True if the checkpoint is a quantised GGUF.

    Raises:
        ConfigError: int8 on a GPU.
    """
    cpu = device.kind == "cpu"
    if choose_quantization(model, "cpu" if cpu else "cuda", quantized=quantized) == "int8":
        return Formats("float32", int8=True, packed=True)
    if model.dtype != "auto":
        return Formats(model.dtype, packed=cpu)
    if not cpu or decoder.checkpoint_dtype in ("bfloat16", "float16"):
        return Formats("bfloat16", packed=cpu)
    return Formats("float32", packed=cpu)


def parameter_count(decoder: DecoderConfig) -> int:
    """Return the parameters of the whole model; tied embeddings count once."""
    return weight_bytes(decoder, Formats("float32"), 1).total // 4


def weight_bytes(decoder: DecoderConfig, formats: Formats, ranks: int) -> WeightBytes:
    """Return the bytes of the parameters on one rank.

    Query heads, KV heads, the MLP and the vocabulary are divided by the ranks (KV heads are repeated where there are
    fewer of them than ranks); norms and the biases of row-parallel linears are on every rank. int8 linears have one
    byte an element and 12 bytes for each output row (scale, sum, and four columns that fix the range of activations).

    Args:
        decoder: dimensions.
        formats: element types.
        ranks: tensor-parallel size.
    """
    shape = layer_shape(decoder, formats, ranks)
    hidden, vocab = decoder.hidden_size, math.ceil(decoder.vocab_size / ranks)
    embedding = vocab * hidden * formats.element_bytes
    head = shape.linear(vocab, hidden) if formats.packed or not decoder.tie_embeddings else 0
    layers = sum(shape.layer(index) for index in range(decoder.num_layers))
    return WeightBytes(embedding=embedding, layers=layers + hidden * shape.norm_bytes, head=head)


def idle_bytes(decoder: DecoderConfig, formats: Formats, ranks: int) -> int:
    """Return the bytes of the parameters that one token does not read: experts that are not chosen for it."""
    shape = layer_shape(decoder, formats, ranks)
    return sum(shape.idle(index) for index in range(decoder.num_layers))


def layer_shape(decoder: DecoderConfig, formats: Formats, ranks: int) -> LayerShape:
    """Return what the layers' sizes follow from.

    Raises:
        UnsupportedModelError: the heads cannot be divided by the ranks.
    """
    delta, experts = decoder.delta, decoder.experts
    parts = {"intermediate size": decoder.intermediate_size}
    if delta is not None:
        parts["linear_num_key_heads"] = delta.key_heads
    if experts is not None:
        parts["expert size"] = experts.intermediate_size
        parts["shared expert size"] = experts.shared_intermediate_size
    for what, count in parts.items():
        if count % ranks:
            raise UnsupportedModelError(
                f"--tensor-parallel-size {ranks}: {what} {count} does not divide", param="tensor_parallel_size"
            )
    kv_heads = kv_heads_per_rank(decoder, ranks)
    return LayerShape(decoder, ranks, kv_heads, formats.element_bytes, formats.cache_element_bytes, formats.int8)


def divides(decoder: DecoderConfig, ranks: int) -> bool:
    """Return whether a model can be split over so many ranks."""
    try:
        layer_shape(decoder, Formats("float32"), ranks)
    except UnsupportedModelError:
        return False
    return True


def kv_heads_per_rank(decoder: DecoderConfig, ranks: int) -> int:
    """Return the KV heads on one rank.

    Raises:
        UnsupportedModelError: the heads cannot be divided.
    """
    if decoder.num_heads % ranks or (decoder.num_kv_heads % ranks and ranks % decoder.num_kv_heads):
        raise UnsupportedModelError(
            f"--tensor-parallel-size {ranks}: {decoder.num_heads} query, {decoder.num_kv_heads} KV heads do not divide",
            param="tensor_parallel_size",
        )
    return max(1, decoder.num_kv_heads // ranks)


def activation_bytes(decoder: DecoderConfig, formats: Formats, ranks: int, step_tokens: int) -> int:
    """Return the memory of the largest step (an estimate from above for eager execution).

    What lives at once in the widest place of a layer: residual, normed input and output (3 x hidden), q, k, v and the
    attention output, or gate, up and their product.
    """
    attention = (2 * decoder.num_heads // ranks + 2 * kv_heads_per_rank(decoder, ranks)) * decoder.head_dim
    widest = [attention, 3 * decoder.intermediate_size // ranks]
    if decoder.attention_gate:
        widest.append(attention + decoder.num_heads // ranks * decoder.head_dim)
    if decoder.delta is not None:
        # q, k, v and z; q and k once more for each value head; all in fp32.
        delta = decoder.delta
        once = 2 * delta.key_heads * delta.key_dim + 2 * delta.value_heads * delta.value_dim
        heads = delta.value_heads * (2 * delta.key_dim + 2 * delta.value_dim)
        widest.append((once + heads * 4 // formats.element_bytes) // ranks)
    if decoder.experts is not None:
        # Inputs and results of all pairs of token and expert.
        widest.append(2 * decoder.experts.top_k * decoder.hidden_size)
    return step_tokens * (3 * decoder.hidden_size + max(widest)) * formats.element_bytes


def logits_bytes(decoder: DecoderConfig, rows: int) -> int:
    """Return the memory of sampling: the logits in float32 and three copies of them (as `worker.profile` reserves)."""
    return 4 * rows * decoder.vocab_size * 4


def layer_caches(decoder: DecoderConfig, formats: Formats, ranks: int) -> list[LayerCache]:
    """Return the cache declaration of each layer on one rank."""
    shape = layer_shape(decoder, formats, ranks)
    return [LayerCache(index, shape.cache(index)) for index in range(decoder.num_layers)]

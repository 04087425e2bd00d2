"""The dimensions and switches of a decoder, as the models need them.

Pure data; must not read ``config.json`` (see `decoder`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.config.rope import Rope

Mixer = Literal["full", "sliding", "chunked", "recurrent"]


@dataclass(frozen=True)
class LayerKind:
    """What one layer is.

    Attributes:
        mixer: which tokens it reads: all, a window, its own chunk, or a recurrent state.
        rope: index into `DecoderConfig.ropes`; None: the layer has no positions.
        experts: the MLP is a mixture of experts.
    """

    mixer: Mixer = "full"
    rope: int | None = 0
    experts: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts with one shared expert beside it.

    Attributes:
        count: experts.
        top_k: of them that a token uses.
        intermediate_size: inner width of an expert.
        shared_intermediate_size: inner width of the shared expert.
        router: "softmax": the weight of an expert is its softmax probability, on its output; "sigmoid": it is the
            sigmoid of its own logit, on its **input** (Llama 4).
        renormalise: the chosen weights are divided by their sum (softmax only).
        shared_gate: the shared expert's output has a sigmoid gate.
    """

    count: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    router: Literal["softmax", "sigmoid"]
    renormalise: bool = False
    shared_gate: bool = False


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule layers.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values and of the state; a multiple of ``key_heads``.
        key_dim: of a head.
        value_dim: of a head.
        conv_tokens: width of the causal convolution before it.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int


@dataclass(frozen=True)
class Temperature:
    """Queries of layers without positions grow with the position.

    The factor is ``1 + scale * log(1 + floor((position + 1) / floor_tokens))`` (arXiv 2501.19399, as in Llama 4).
    """

    floor_tokens: int
    scale: float


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and switches of a decoder; all counts are of the whole model, not of a rank.

    Attributes:
        ropes: rotary embeddings; layers refer to them by index.
        layers: one entry a layer.
        score_scale: factor on the attention scores.
        qk_norm: each query and key head has a norm with a weight, before the rotation.
        qk_unit_norm: each has a norm without a weight, after the rotation, on layers with positions.
        window_tokens: that a sliding layer reads; 0 without such layers.
        chunk_tokens: of chunked layers; 0 without such layers.
        score_cap: scores become ``cap * tanh(score / cap)``; None: they do not.
        logit_cap: the same for the logits.
        temperature: of layers without positions.
        attention_gate: the query projection also gives a gate; the attention's output is multiplied by its sigmoid.
        norm_offset: what is added to a stored norm weight: 1 for weights that are centred at zero.
        norms_after: what a layer's mixer and MLP return is normalised before it is added.
        embedding_scale: factor on the token embeddings, before it is rounded to the type of the activations.
        activation: of the gated MLPs.
        experts: the mixture of the layers that have one.
        delta: the recurrent layers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    ropes: tuple[Rope, ...]
    layers: tuple[LayerKind, ...]
    max_position: int
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    score_scale: float
    qk_unit_norm: bool = False
    window_tokens: int = 0
    chunk_tokens: int = 0
    score_cap: float | None = None
    logit_cap: float | None = None
    temperature: Temperature | None = None
    attention_gate: bool = False
    norm_offset: float = 0.0
    norms_after: bool = False
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: Experts | None = None
    delta: DeltaNet | None = None

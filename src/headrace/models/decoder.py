"""The decoder that the model files share: embedding, layers, norm, head.

Must not know an architecture's name: a family says in `make_layer` what its layers are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from headrace.attention.arena import KvArena
from headrace.attention.select import AttentionNeed
from headrace.attention.step import StepContext
from headrace.base.errors import WeightLoadError
from headrace.config.decoder import DecoderConfig
from headrace.layers.context import ModelContext
from headrace.layers.embedding import OutputHead, TokenEmbedding, VocabTable
from headrace.layers.experts import ExpertMixture
from headrace.layers.kernels import check_context
from headrace.layers.linear import Targets
from headrace.layers.mlp import GatedMlp
from headrace.layers.norm import RmsNorm
from headrace.ops.activation.eager import soft_cap
from headrace.ops.rope.eager import RopeTable
from headrace.ops.rope.frequencies import inverse_frequencies
from headrace.types.cache_specs import LayerCache

Turn = tuple[Tensor, Tensor]
"""Rows of cos and of signed sin, each [T, 1, rotated elements]."""


class Mixer(Protocol):
    """How a layer mixes tokens: attention, or a recurrent state."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        ...

    def caches(self) -> list[LayerCache]:
        """Declare what the layer keeps on this rank."""
        ...

    def attention_needs(self) -> list[AttentionNeed]:
        """Declare what attention computes beyond what the cache says."""
        ...

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        ...

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        ...

    def bind_cache(self, arena: KvArena) -> None:
        """Take the layer's part of the KV memory."""
        ...

    def __call__(self, x: Tensor, turn: Turn | None, step: StepContext) -> Tensor:
        """Return [T, H] for x [T, H]; ``turn`` are the layer's rows of cos and sin, None without positions."""
        ...


class DecoderLayer:
    """Pre-norm layer: ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; optionally with a norm after each of both.

    Args:
        context: where it runs.
        decoder: dimensions.
        mixer: attention block or recurrent mixer.
        mlp: MLP block or mixture of experts.
        mixer_name: of the mixer in the checkpoint.
        mlp_name: of the MLP in the checkpoint.
    """

    def __init__(
        self,
        context: ModelContext,
        decoder: DecoderConfig,
        mixer: Mixer,
        mlp: GatedMlp | ExpertMixture,
        *,
        mixer_name: str = "self_attn",
        mlp_name: str = "mlp",
    ) -> None:
        def norm() -> RmsNorm:
            return RmsNorm(context, decoder.hidden_size, decoder.rms_eps, decoder.norm_offset)

        self.mixer, self.mlp = mixer, mlp
        self._mixer_name, self._mlp_name = mixer_name, mlp_name
        self._mixer_norm, self._mlp_norm = norm(), norm()
        self._mixer_after = norm() if decoder.norms_after else None
        self._mlp_after = norm() if decoder.norms_after else None

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(norm.held_bytes for norm in self._norms().values()) + self.mixer.held_bytes + self.mlp.held_bytes

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix ("model.layers.0.")."""
        found = {
            **self.mixer.targets(f"{prefix}{self._mixer_name}."),
            **self.mlp.targets(f"{prefix}{self._mlp_name}."),
        }
        for name, norm in self._norms().items():
            found.update(norm.targets(prefix + name))
        return found

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        for part in (*self._norms().values(), self.mixer, self.mlp):
            part.finalize()

    def __call__(self, x: Tensor, turn: Turn | None, step: StepContext) -> Tensor:
        """Return x with the layer's results added in place.

        Args:
            x: [T, H] residual stream.
            turn: rows of cos and sin of the layer's rotary embedding; None without one.
            step: of the runner.

        Mutates:
            ``x``, and the KV memory of the step's tokens.
        """
        mixed = self.mixer(self._mixer_norm(x), turn, step)
        x.add_(mixed if self._mixer_after is None else self._mixer_after(mixed))
        spread = self.mlp(self._mlp_norm(x))
        return x.add_(spread if self._mlp_after is None else self._mlp_after(spread))

    def _norms(self) -> dict[str, RmsNorm]:
        """Return the norms by their names in the checkpoint; what one is called depends on how many there are."""
        if self._mixer_after is None or self._mlp_after is None:
            return {"input_layernorm": self._mixer_norm, "post_attention_layernorm": self._mlp_norm}
        return {
            "input_layernorm": self._mixer_norm,
            "post_attention_layernorm": self._mixer_after,
            "pre_feedforward_layernorm": self._mlp_norm,
            "post_feedforward_layernorm": self._mlp_after,
        }


class CausalModel(ABC):
    """A decoder with a language-model head.

    Args:
        decoder: dimensions.
        context: where it runs.

    Raises:
        ConfigError: the context cannot be served, or the dimensions do not split over the ranks.
    """

    def __init__(self, decoder: DecoderConfig, context: ModelContext) -> None:
        check_context(context)
        self.decoder = decoder
        self.context = context
        self._embedding = TokenEmbedding(context, decoder.vocab_size, decoder.hidden_size)
        self._layers = [self.make_layer(index) for index in range(decoder.num_layers)]
        self._norm = RmsNorm(context, decoder.hidden_size, decoder.rms_eps, decoder.norm_offset)
        own_table = None if decoder.tie_embeddings else VocabTable(context, decoder.vocab_size, decoder.hidden_size)
        self._own_table = own_table
        self._head = OutputHead(context, own_table or self._embedding.table, decoder.vocab_size)
        self._embedding_scale = torch.tensor(decoder.embedding_scale).to(context.dtype).item()
        self._ropes = []
        for rope in decoder.ropes:
            frequencies, factor = inverse_frequencies(rope.theta, rope.dim, rope.scaling)
            self._ropes.append(RopeTable(frequencies, factor, context.dtype, context.device))
        self._finalized = False

    @abstractmethod
    def make_layer(self, index: int) -> DecoderLayer:
        """Return layer ``index``; called while the model is built, with ``decoder`` and ``context`` set."""

    @property
    def ignorable_weights(self) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that may be there without being used."""
        return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if self.decoder.tie_embeddings else ()))

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the KV cache; the backend's memory must be allocated with it."""
        return self.context.cache_dtype

    def layer_caches(self) -> list[LayerCache]:
        """Declare what each layer keeps for its tokens, on this rank."""
        return [cache for layer in self._layers for cache in layer.mixer.caches()]

    def attention_needs(self) -> list[AttentionNeed]:
        """Declare what each attention layer computes beyond what its cache says, on this rank."""
        return [need for layer in self._layers for need in layer.mixer.attention_needs()]

    def weight_targets(self) -> Targets:
        """Return every tensor of the checkpoint by its Hugging Face name. Requires that `finalize` was not called.

        Raises:
            WeightLoadError: after `finalize`.
        """
        if self._finalized:
            raise WeightLoadError("the weights are packed already; build a new model to load others")
        targets = self._embedding.table.targets("model.embed_tokens")
        for index, layer in enumerate(self._layers):
            targets.update(layer.targets(f"model.layers.{index}."))
        targets.update(self._norm.targets("model.norm"))
        if self._own_table is not None:
            targets.update(self._own_table.targets("lm_head"))
        return targets

    def finalize(self) -> None:
        """Pack or quantise the loaded weights and free the originals. Call once, after loading."""
        for layer in self._layers:
            layer.finalize()
        self._norm.finalize()
        self._head.finalize(keep_table=self.decoder.tie_embeddings)
        self._finalized = True

    def bind_cache(self, arena: KvArena) -> None:
        """Let each layer take its part of the KV memory; an earlier one is dropped."""
        for layer in self._layers:
            layer.mixer.bind_cache(arena)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Compute the final hidden states of a step's tokens.

        Args:
            token_ids: [T] int64.
            step: positions and memory of the same tokens.

        Returns:
            [T, H], normalised.

        Mutates:
            the KV memory of these tokens.
        """
        turns = [rope.rows(step.positions, step.longest_tokens) for rope in self._ropes]
        x = self._embedding(token_ids)
        if self._embedding_scale != 1:
            x.mul_(self._embedding_scale)
        for layer, kind in zip(self._layers, self.decoder.layers, strict=True):
            x = layer(x, None if kind.rope is None else turns[kind.rope], step)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [R, vocabulary] for hidden [R, H]."""
        logits, cap = self._head(hidden), self.decoder.logit_cap
        return logits if cap is None else soft_cap(logits, cap, invariant=self.context.invariant)

    def parameter_bytes(self) -> int:
        """Bytes of the parameters on this rank, as they are held now."""
        parts = [self._embedding.held_bytes, self._norm.held_bytes, self._head.held_bytes]
        own = 0 if self._own_table is None else self._own_table.weight.nbytes
        return sum(parts) + own + sum(layer.held_bytes for layer in self._layers)

"""Llama 1 to 3 and what shares its shape (SmolLM2, TinyLlama): grouped heads, optional biases."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer


class LlamaForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        attention = Attention(self.context, self.decoder, index)
        return DecoderLayer(self.context, self.decoder, attention, GatedMlp(self.context, self.decoder))

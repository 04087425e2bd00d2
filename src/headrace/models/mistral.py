"""Mistral with full attention: Llama's shape with a head width of its own."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer


class MistralForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        attention = Attention(self.context, self.decoder, index)
        return DecoderLayer(self.context, self.decoder, attention, GatedMlp(self.context, self.decoder))

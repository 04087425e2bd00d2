"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v, none on the output."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer


class Qwen2ForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        attention = Attention(self.context, self.decoder, index)
        return DecoderLayer(self.context, self.decoder, attention, GatedMlp(self.context, self.decoder))

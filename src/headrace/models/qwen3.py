"""Qwen3 dense: a norm on each query and key head before the rotation."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer


class Qwen3ForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        attention = Attention(self.context, self.decoder, index)
        return DecoderLayer(self.context, self.decoder, attention, GatedMlp(self.context, self.decoder))

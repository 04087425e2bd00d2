"""Gemma 3 text: five layers with a sliding window to each full one, norms before and after both sublayers, GeGLU."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer


class Gemma3ForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        attention = Attention(self.context, self.decoder, index)
        return DecoderLayer(self.context, self.decoder, attention, GatedMlp(self.context, self.decoder))

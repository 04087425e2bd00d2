"""Llama 4 text: three layers with chunked attention to each full one without positions, mixtures of experts."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.experts import ExpertMixture, ExpertNames
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer

_NAMES = ExpertNames(router="router", stacked=True)


class Llama4ForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        context, decoder = self.context, self.decoder
        mixed = decoder.layers[index].experts
        mlp = ExpertMixture(context, decoder, _NAMES) if mixed else GatedMlp(context, decoder)
        return DecoderLayer(context, decoder, Attention(context, decoder, index), mlp, mlp_name="feed_forward")

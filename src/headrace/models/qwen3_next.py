"""Qwen3-Next: three gated DeltaNet layers to each layer with gated full attention, mixtures of experts."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.delta_net import DeltaNetMixer
from headrace.layers.experts import ExpertMixture, ExpertNames
from headrace.layers.mlp import GatedMlp
from headrace.models.decoder import CausalModel, DecoderLayer

_NAMES = ExpertNames(router="gate")


class Qwen3NextForCausalLM(CausalModel):
    """See the module."""

    def make_layer(self, index: int) -> DecoderLayer:
        """See `CausalModel.make_layer`."""
        context, decoder, kind = self.context, self.decoder, self.decoder.layers[index]
        mlp = ExpertMixture(context, decoder, _NAMES) if kind.experts else GatedMlp(context, decoder)
        if kind.mixer == "recurrent":
            mixer = DeltaNetMixer(context, decoder, index)
            return DecoderLayer(context, decoder, mixer, mlp, mixer_name="linear_attn")
        return DecoderLayer(context, decoder, Attention(context, decoder, index), mlp)

    @property
    def ignorable_weights(self) -> tuple[str, ...]:
        """See `CausalModel.ignorable_weights`; the checkpoint also has a head for several tokens at once."""
        return (*super().ignorable_weights, "mtp.*")

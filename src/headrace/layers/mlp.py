"""Gated MLP of a decoder layer (SwiGLU), split over ranks by its inner width."""

from __future__ import annotations

from torch import Tensor

from headrace.config.decoder import DecoderConfig
from headrace.layers.context import ModelContext
from headrace.layers.linear import ColumnLinear, RowLinear, RowPart, Targets
from headrace.ops.activation.eager import silu_mul, silu_mul_invariant


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``.

    Args:
        context: where it runs.
        decoder: dimensions.
    """

    def __init__(self, context: ModelContext, decoder: DecoderConfig) -> None:
        full = decoder.intermediate_size
        own = context.tp.share(full, "intermediate size")
        first = context.tp.rank * own
        self.gate_up = ColumnLinear(
            context,
            decoder.hidden_size,
            (RowPart("gate_proj", full, first, own), RowPart("up_proj", full, first, own)),
            bias=decoder.mlp_bias,
        )
        self.down = RowLinear(
            context,
            "down_proj",
            full_columns=full,
            first=first,
            columns=own,
            out_features=decoder.hidden_size,
            bias=decoder.mlp_bias,
        )
        self._activate = silu_mul_invariant if context.invariant else silu_mul

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.gate_up.held_bytes + self.down.held_bytes

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        return {**self.gate_up.targets(prefix), **self.down.targets(prefix)}

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        self.gate_up.finalize()
        self.down.finalize()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H] for x [T, H]."""
        return self.down(self._activate(self.gate_up(x)))

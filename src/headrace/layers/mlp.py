"""Gated MLP of a decoder layer (SwiGLU, GeGLU), split over ranks by its inner width."""

from __future__ import annotations

from torch import Tensor

from headrace.config.decoder import DecoderConfig
from headrace.layers.context import ModelContext
from headrace.layers.linear import ColumnLinear, RowLinear, RowPart, Targets
from headrace.ops.activation.eager import gelu_mul, gelu_mul_invariant, silu_mul, silu_mul_invariant

_ACTIVATIONS = {
    ("silu", False): silu_mul,
    ("silu", True): silu_mul_invariant,
    ("gelu_tanh", False): gelu_mul,
    ("gelu_tanh", True): gelu_mul_invariant,
}
"""By name and whether a row's bits must not depend on other rows."""


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``.

    Args:
        context: where it runs.
        decoder: dimensions.
        inner: width between the two maps; None is that of the model's dense layers.
        reduce: sum the result over the ranks; False leaves that to the caller.
    """

    def __init__(
        self, context: ModelContext, decoder: DecoderConfig, *, inner: int | None = None, reduce: bool = True
    ) -> None:
        full = inner or decoder.intermediate_size
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
            reduce=reduce,
        )
        self._activate = _ACTIVATIONS[decoder.activation, context.invariant]

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

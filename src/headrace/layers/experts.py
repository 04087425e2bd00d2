"""Mixture of experts with a shared expert, each expert split over ranks by its inner width.

The router runs on every rank and is never quantised: a rounded logit can choose another expert. Must not know an
architecture: how the experts are stored and called comes in as `ExpertNames`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from headrace.base.errors import InvariantError
from headrace.config.decoder import DecoderConfig
from headrace.layers.context import ModelContext
from headrace.layers.linear import ColumnLinear, RowPart, Targets
from headrace.layers.mlp import GatedMlp
from headrace.ops.activation.eager import sigmoid_mul
from headrace.ops.moe.grouped import mixture, route_sigmoid, route_softmax
from headrace.weights.target import WeightTarget


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint stores a mixture.

    Attributes:
        router: name of the router's linear.
        stacked: all experts in two tensors, input dimension first (``experts.gate_up_proj`` [E, H, 2 I] and
            ``experts.down_proj`` [E, I, H]), instead of three linears for each (``experts.0.gate_proj.weight``).
    """

    router: str
    stacked: bool = False


class ExpertMixture:
    """``shared(x)`` plus the weighted sum of the experts that the router chooses for each token.

    Args:
        context: where it runs.
        decoder: dimensions; has ``experts``.
        names: of the checkpoint.
    """

    def __init__(self, context: ModelContext, decoder: DecoderConfig, names: ExpertNames) -> None:
        shape = decoder.experts
        if shape is None:
            raise InvariantError("a mixture of experts without its dimensions")
        self._shape, self._names, self._context = shape, names, context
        self._hidden = decoder.hidden_size
        exact = replace(context, quantization="none")
        self._router = ColumnLinear(exact, self._hidden, (RowPart(names.router, shape.count, 0, shape.count),), False)
        self._shared = GatedMlp(context, decoder, inner=shape.shared_intermediate_size, reduce=False)
        gate = RowPart("shared_expert_gate", 1, 0, 1)
        self._shared_gate = ColumnLinear(exact, self._hidden, (gate,), bias=False) if shape.shared_gate else None
        self._experts = [
            GatedMlp(context, decoder, inner=shape.intermediate_size, reduce=False) for _ in range(shape.count)
        ]

    @property
    def _parts(self) -> list[ColumnLinear | GatedMlp]:
        gate = [] if self._shared_gate is None else [self._shared_gate]
        return [self._router, self._shared, *gate, *self._experts]

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(part.held_bytes for part in self._parts)

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix ("model.layers.0.mlp.")."""
        found = {**self._router.targets(prefix), **self._shared.targets(f"{prefix}shared_expert.")}
        if self._shared_gate is not None:
            found.update(self._shared_gate.targets(prefix))
        if self._names.stacked:
            found.update(self._stacked_targets(f"{prefix}experts."))
        else:
            for index, expert in enumerate(self._experts):
                found.update(expert.targets(f"{prefix}experts.{index}."))
        return found

    def finalize(self) -> None:
        """Pack or quantise the loaded weights."""
        for part in self._parts:
            part.finalize()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H] for x [T, H]; one all-reduce with several ranks."""
        shape, logits = self._shape, self._router(x).float()
        if shape.router == "softmax":
            weights, chosen = route_softmax(logits, shape.top_k, shape.renormalise)
        else:
            weights, chosen = route_sigmoid(logits, shape.top_k)
        routed = mixture(x, weights, chosen, self._experts, on_input=shape.router == "sigmoid")
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = sigmoid_mul(shared, self._shared_gate(x), invariant=self._context.invariant)
        return self._context.tp.all_reduce(routed.add_(shared))

    def _stacked_targets(self, prefix: str) -> Targets:
        """Return the two tensors that hold all experts; each expert's own loaders take its slice, transposed."""
        count, hidden, inner = self._shape.count, self._hidden, self._shape.intermediate_size
        loaders = [expert.targets("") for expert in self._experts]

        def spread(*names: str) -> Callable[[Tensor], None]:
            def load(full: Tensor) -> None:
                for found, matrix in zip(loaders, full, strict=True):
                    for name, part in zip(names, matrix.t().chunk(len(names)), strict=True):
                        found[name].load(part)

            return load

        return {
            f"{prefix}gate_up_proj": WeightTarget(
                (count, hidden, 2 * inner), spread("gate_proj.weight", "up_proj.weight")
            ),
            f"{prefix}down_proj": WeightTarget((count, inner, hidden), spread("down_proj.weight")),
        }

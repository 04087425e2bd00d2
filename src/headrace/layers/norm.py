"""RMS norm with its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.layers.context import ModelContext
from headrace.layers.linear import Targets, copy_part
from headrace.ops.norm.eager import ShortRmsNorm, rms_norm
from headrace.weights.target import WeightTarget


class RmsNorm:
    """RMS norm over the last dimension.

    Args:
        context: where it runs.
        features: width.
        eps: added to the mean square.
    """

    def __init__(self, context: ModelContext, features: int, eps: float) -> None:
        self.weight = torch.empty(features, dtype=context.dtype, device=context.device)
        self._eps = eps
        self._context = context
        self._short: ShortRmsNorm | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes

    def targets(self, name: str) -> Targets:
        """Return the checkpoint tensor ``name + ".weight"``."""
        return {f"{name}.weight": WeightTarget(tuple(self.weight.shape), copy_part(self.weight))}

    def finalize(self) -> None:
        """Choose how to compute, now that the weight is loaded."""
        context = self._context
        if context.device.type == "cpu" and context.dtype == torch.float32 and not context.invariant:
            self._short = ShortRmsNorm(self.weight, self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, features]."""
        return rms_norm(x, self.weight, self._eps) if self._short is None else self._short(x)

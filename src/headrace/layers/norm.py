"""RMS norm with its weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.layers.context import ModelContext
from headrace.layers.linear import Targets
from headrace.ops.norm.eager import ShortRmsNorm, rms_norm
from headrace.weights.target import WeightTarget


def copy_shifted(into: Tensor, offset: float) -> Callable[[Tensor], None]:
    """Return a loader that copies a full tensor into ``into`` and adds ``offset``."""

    def load(full: Tensor) -> None:
        into.copy_(full).add_(offset)

    return load


class RmsNorm:
    """RMS norm over the last dimension.

    Args:
        context: where it runs.
        features: width.
        eps: added to the mean square.
        offset: added to the stored weight. With one, the norm and its weight are float32 whatever the activations are:
            a weight near 1 would lose what the checkpoint says about its distance from 1.
    """

    def __init__(self, context: ModelContext, features: int, eps: float, offset: float = 0.0) -> None:
        dtype = torch.float32 if offset else context.dtype
        self.weight = torch.empty(features, dtype=dtype, device=context.device)
        self._eps = eps
        self._offset = offset
        self._context = context
        self._short: ShortRmsNorm | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes

    def targets(self, name: str) -> Targets:
        """Return the checkpoint tensor ``name + ".weight"``."""
        return {f"{name}.weight": WeightTarget(tuple(self.weight.shape), copy_shifted(self.weight, self._offset))}

    def finalize(self) -> None:
        """Choose how to compute, now that the weight is loaded."""
        context = self._context
        if context.device.type == "cpu" and context.dtype == torch.float32 and not context.invariant:
            self._short = ShortRmsNorm(self.weight, self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, features]."""
        if self._short is not None:
            return self._short(x)
        if x.dtype != self.weight.dtype:
            return rms_norm(x.to(self.weight.dtype), self.weight, self._eps).to(x.dtype)
        return rms_norm(x, self.weight, self._eps)

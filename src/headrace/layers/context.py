"""What every layer needs to know about where it runs. Must not hold parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.parallel.groups import TensorParallel


def cache_dtype(dtype: torch.dtype, quantization: str) -> torch.dtype:
    """Return the type of the KV cache: that of the activations; bfloat16 beside int8 linears.

    Measured: half the bytes to gather make attention 1.5 times faster at 32 rows, and the rounding of keys and values
    changes the answer a thousand times less than that of the int8 linears.

    Args:
        dtype: of the activations.
        quantization: "none" or "int8".
    """
    return torch.bfloat16 if quantization == "int8" else dtype


@dataclass(frozen=True)
class ModelContext:
    """How and where a model is built.

    Attributes:
        dtype: of weights and activations; float32 with quantization "int8".
        device: of weights and activations.
        tp: the ranks that share each layer.
        quantization: "none", or "int8" (dynamic 8-bit linears, CPU).
        invariant: a row's bits must not depend on the rest of the batch (float32 on a CPU).
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    quantization: Literal["none", "int8"]
    invariant: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the KV cache; see `cache_dtype`."""
        return cache_dtype(self.dtype, self.quantization)

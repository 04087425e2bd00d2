"""Chooses how a linear map is computed once its weight is loaded. Must not know where the weight came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.base.errors import ConfigError, InvariantError
from headrace.layers.context import ModelContext
from headrace.ops.linear import int8, packed
from headrace.ops.linear.plain import PlainLinear, TiledLinear


class LinearKernel(Protocol):
    """A linear map with its weight inside: [M, K] -> [M, N].

    Attributes:
        held_bytes: of the weight and the bias as they are held.
        keeps_weight: the tensor that was given is held; else a copy in a form of its own.
    """

    held_bytes: int
    keeps_weight: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]."""
        ...


def check_context(context: ModelContext) -> None:
    """Refuse a context that no kernel serves.

    Raises:
        ConfigError: what does not go together, and what to do.
    """
    cpu = context.device.type == "cpu"
    if context.quantization not in ("none", "int8"):
        raise ConfigError(f"unknown quantization {context.quantization!r}; known: none, int8", param="quantization")
    if context.quantization == "int8":
        if not cpu or context.dtype != torch.float32:
            raise ConfigError(
                "--quantization int8 needs a CPU and float32 activations; remove --dtype or --quantization",
                param="quantization",
            )
        if not int8.is_available():
            raise ConfigError("this build of torch has no FBGEMM: use --quantization none", param="quantization")
    if context.invariant and (not cpu or context.dtype != torch.float32 or context.quantization != "none"):
        raise ConfigError("batch-invariant results need --dtype float32 on a CPU without quantization", param="dtype")


def make_kernel(weight: Tensor, bias: Tensor | None, context: ModelContext) -> LinearKernel:
    """Return the fastest kernel that keeps the context's promises.

    Args:
        weight: [N, K], loaded.
        bias: [N] or None.
        context: device, type, quantization, invariance.
    """
    if context.quantization == "int8":
        return int8.Int8Linear(weight, bias)
    if context.device.type != "cpu":
        return PlainLinear(weight, bias)
    if context.invariant:
        if packed.is_available(weight.dtype) and packed.keeps_bits(*weight.shape):
            return packed.PackedLinear(weight, bias, invariant=True)
        return TiledLinear(weight, bias)
    if weight.dtype == torch.bfloat16 and packed.is_available(weight.dtype):
        return packed.PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def unloaded(name: str) -> Callable[[Tensor], Tensor]:
    """Return a kernel that refuses to run, for a layer whose `finalize` was not called."""

    def refuse(x: Tensor) -> Tensor:
        raise InvariantError(f"{name} is used before finalize()")

    return refuse

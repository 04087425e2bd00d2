"""Linear layers split over ranks: by output rows, by input columns. Each names the checkpoint tensors that fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.layers.context import ModelContext
from headrace.layers.kernels import LinearKernel, make_kernel, unloaded
from headrace.weights.target import WeightTarget

Targets = dict[str, WeightTarget]


@dataclass(frozen=True)
class RowPart:
    """Output rows that one checkpoint tensor gives to a column-parallel layer.

    Attributes:
        name: of the tensor, between the layer's prefix and ".weight".
        full_rows: rows in the checkpoint.
        first: the first one of this rank.
        rows: how many this rank has.
        order: [rows] which rows of the tensor this rank has, in its own order; None: ``rows`` from ``first`` on.
    """

    name: str
    full_rows: int
    first: int
    rows: int
    order: Tensor | None = None

    @property
    def take(self) -> slice | Tensor:
        """Index of this rank's rows in the full tensor."""
        return slice(self.first, self.first + self.rows) if self.order is None else self.order


def ordered_part(name: str, full_rows: int, order: Tensor) -> RowPart:
    """Return a part whose rows are picked one by one.

    Args:
        name: of the tensor.
        full_rows: rows in the checkpoint.
        order: [n] which of them this rank has, in its own order.
    """
    return RowPart(name, full_rows, 0, order.numel(), order)


def copy_part(
    into: Tensor, rows: slice | Tensor | None = None, columns: slice | None = None
) -> Callable[[Tensor], None]:
    """Return a loader that copies a part of a full tensor into ``into``, casting to its type.

    Args:
        into: of the part's shape.
        rows: first dimension of the full tensor, a slice or indices; None is all.
        columns: second dimension; None is all.
    """

    def load(full: Tensor) -> None:
        part = full if rows is None else full[rows]
        into.copy_(part if columns is None else part[:, columns])

    return load


class _Linear:
    def __init__(self, context: ModelContext, out_rows: int, in_columns: int, bias: bool, name: str) -> None:
        self._context = context
        self._name = name
        dtype, device = context.dtype, context.device
        self.weight: Tensor | None = torch.empty(out_rows, in_columns, dtype=dtype, device=device)
        self.bias: Tensor | None = torch.zeros(out_rows, dtype=dtype, device=device) if bias else None
        self._kernel: LinearKernel | Callable[[Tensor], Tensor] = unloaded(name)
        self.held_bytes = self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def finalize(self) -> None:
        """Pack or quantise the loaded weight and let go of the original."""
        if self.weight is None:
            return
        kernel = make_kernel(self.weight, self.bias, self._context)
        self._kernel, self.held_bytes = kernel, kernel.held_bytes
        self.weight = self.bias = None


class ColumnLinear(_Linear):
    """Linear whose outputs are split over the ranks; several checkpoint tensors may lie one above the other.

    Args:
        context: where it runs.
        in_features: inputs.
        parts: outputs of this rank, in order.
        bias: has a bias for every part.
    """

    def __init__(self, context: ModelContext, in_features: int, parts: Sequence[RowPart], bias: bool) -> None:
        self._parts = tuple(parts)
        self._in_features = in_features
        name = "+".join(part.name for part in parts)
        super().__init__(context, sum(part.rows for part in parts), in_features, bias, name)

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix ("model.layers.0.mlp.")."""
        found: Targets = {}
        top = 0
        for part in self._parts:
            take, here = part.take, slice(top, top + part.rows)
            top += part.rows
            if self.weight is not None:
                full = (part.full_rows, self._in_features)
                found[f"{prefix}{part.name}.weight"] = WeightTarget(full, copy_part(self.weight[here], take))
            if self.bias is not None:
                found[f"{prefix}{part.name}.bias"] = WeightTarget((part.full_rows,), copy_part(self.bias[here], take))
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, outputs of this rank] for x [T, in_features]."""
        return self._kernel(x)


class RowLinear(_Linear):
    """Linear whose inputs are split over the ranks; the results are summed over them, here or by the caller.

    Args:
        context: where it runs.
        name: of the checkpoint tensor.
        full_columns: inputs in the checkpoint.
        first: the first input of this rank.
        columns: inputs of this rank.
        out_features: outputs.
        bias: has a bias; rank 0 alone adds it.
        reduce: sum over the ranks; False leaves that to the caller.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        *,
        full_columns: int,
        first: int,
        columns: int,
        out_features: int,
        bias: bool,
        reduce: bool = True,
    ) -> None:
        self._reduce = reduce
        self._take = slice(first, first + columns)
        self._full = (out_features, full_columns)
        super().__init__(context, out_features, columns, bias, name)

    def targets(self, prefix: str) -> Targets:
        """Return the checkpoint tensors under a prefix."""
        found: Targets = {}
        if self.weight is not None:
            loader = copy_part(self.weight, None, self._take)
            found[f"{prefix}{self._name}.weight"] = WeightTarget(self._full, loader)
        if self.bias is not None:
            keep = copy_part(self.bias) if self._context.tp.rank == 0 else _ignore
            found[f"{prefix}{self._name}.bias"] = WeightTarget((self._full[0],), keep)
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out_features] for x [T, inputs of this rank]; one all-reduce with several ranks."""
        partial = self._kernel(x)
        return self._context.tp.all_reduce(partial) if self._reduce else partial


def _ignore(full: Tensor) -> None:
    """Another rank keeps this tensor."""

"""Dense linear through torch's own operator: any device, any float type; its bits depend on the number of rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class PlainLinear:
    """``x @ weight.T + bias``.

    Args:
        weight: [N, K]; kept.
        bias: [N] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.held_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]."""
        return F.linear(x, self._weight, self._bias)


class TiledLinear:
    """Plain linear on tiles of a fixed height: a row's bits cannot depend on how many rows there are.

    Args:
        weight: [N, K]; kept.
        bias: [N] or None.
        tile_rows: height of a tile.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tile_rows: int = 16) -> None:
        self._weight = weight
        self._bias = bias
        self._tile = tile_rows
        self.held_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]."""
        rows = x.shape[0]
        out = x.new_empty(rows, self._weight.shape[0])
        for first in range(0, rows, self._tile):
            tile = x[first : first + self._tile]
            short = self._tile - tile.shape[0]
            if short:
                tile = F.pad(tile, (0, 0, 0, short))
            out[first : first + self._tile] = F.linear(tile, self._weight, self._bias)[: rows - first]
        return out

"""Dense linear through torch's own operator: any device, any float type; its bits depend on the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HEIGHTS = (16, 64, 256)
_proven: dict[tuple[int, int, int], tuple[int, ...]] = {}


class PlainLinear:
    """``x @ weight.T + bias``.

    Args:
        weight: [N, K]; kept.
        bias: [N] or None.
    """

    keeps_weight = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.held_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]."""
        return F.linear(x, self._weight, self._bias)


class TiledLinear:
    """Plain linear on tiles of fixed heights: a row's bits cannot depend on how many rows there are.

    Higher tiles are faster. They are used where they are proven to give the bits of the lowest one.

    Args:
        weight: [N, K]; kept.
        bias: [N] or None.
        heights: of tiles, ascending; None takes those that `proven_heights` finds.
    """

    keeps_weight = True

    def __init__(self, weight: Tensor, bias: Tensor | None, heights: tuple[int, ...] | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._heights = heights or proven_heights(*weight.shape)
        self.held_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]."""
        rows, lowest = x.shape[0], self._heights[0]
        out = x.new_empty(rows, self._weight.shape[0])
        first = 0
        while first < rows:
            height = max((h for h in self._heights if h <= rows - first), default=lowest)
            tile = x[first : first + height]
            if tile.shape[0] < height:
                tile = F.pad(tile, (0, 0, 0, height - tile.shape[0]))
            out[first : first + height] = F.linear(tile, self._weight, self._bias)[: rows - first]
            first += height
        return out


def proven_heights(out_features: int, in_features: int) -> tuple[int, ...]:
    """Return the tile heights that give the same fp32 bits as the lowest, which is always among them.

    The order of sums depends on the shape and the number of threads, not on the values, so random values decide it.
    The answer is remembered for the shape and the current number of threads.
    """
    key = (out_features, in_features, torch.get_num_threads())
    if key not in _proven:
        generator = torch.Generator().manual_seed(21)
        weight = torch.randn(out_features, in_features, generator=generator)
        x = torch.randn(_HEIGHTS[-1], in_features, generator=generator)
        low = TiledLinear(weight, None, _HEIGHTS[:1])(x)
        fits = [torch.equal(TiledLinear(weight, None, (height,))(x), low) for height in _HEIGHTS]
        _proven[key] = _HEIGHTS[:1] + tuple(h for h, fit in zip(_HEIGHTS[1:], fits[1:], strict=True) if fit)
    return _proven[key]

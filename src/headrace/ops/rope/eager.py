"""Rotary embedding from tables of cos and signed sin: four operators for all heads of q and k together."""

from __future__ import annotations

import torch
from torch import Tensor

_PAGE_POSITIONS = 2048


class RopeTable:
    """Rows of cos and sin by position, grown by whole pages: a position's bits never depend on when it was made.

    Args:
        inverse_frequencies: [D/2].
        factor: multiplies cos and sin.
        dtype: of the rows.
        device: of the rows.
    """

    def __init__(self, inverse_frequencies: Tensor, factor: float, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies.float()
        self._factor = factor
        self._dtype = dtype
        self._device = device
        dim = 2 * inverse_frequencies.numel()
        self._rows = torch.empty(0, 2, dim, dtype=dtype, device=device)

    def rows(self, positions: Tensor, length_tokens: int) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin), each [T, 1, D]; the first half of sin is negative.

        Args:
            positions: [T] int64.
            length_tokens: above every position.
        """
        while self._rows.shape[0] < length_tokens:
            self._rows = torch.cat((self._rows, self._page(self._rows.shape[0])))
        picked = self._rows.index_select(0, positions)
        return picked[:, :1], picked[:, 1:]

    def _page(self, first: int) -> Tensor:
        positions = torch.arange(first, first + _PAGE_POSITIONS, dtype=torch.float32)
        angle = positions[:, None] * self._frequencies
        cos, sin = angle.cos() * self._factor, angle.sin() * self._factor
        page = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return page.to(device=self._device, dtype=self._dtype)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Return ``x`` rotated; see `ops.rope.reference`. No fused multiply-add: the bits must not depend on the shape.

    Args:
        x: [T, heads, D].
        cos: [T, 1, R]; the first R elements of a head are rotated, the others stay.
        signed_sin: [T, 1, R].
    """
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, signed_sin), x[..., turned:]), dim=-1)
    half = turned // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return swapped.mul_(signed_sin).add_(x * cos)

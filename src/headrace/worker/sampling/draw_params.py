"""Columns that describe the distributions to draw from. Plain data; must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DrawParams:
    """Parameters of the rows to draw from, each [rows].

    Attributes:
        temperature: above 0.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]

    def take(self, rows: npt.NDArray[np.int64]) -> DrawParams:
        """Return the parameters of some rows."""
        return DrawParams(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

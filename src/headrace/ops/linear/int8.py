"""Dynamic 8-bit linear on CPUs: int8 weights with a scale for each output, activations rounded at each call.

FBGEMM's kernel (VNNI) takes one activation scale for the whole batch, from its smallest and largest value. One row with
a large value (the first token of most models has one) would rob the others of their precision, so each row is first
divided by its largest magnitude. And two columns of 1 and -1, which meet weights of zero, fix the scale: a row then
gives the same bits whichever rows stand beside it. Must not be used on a GPU.
"""

from __future__ import annotations

import threading
import warnings

import torch
from torch import Tensor

_TINY = 1e-20
_RANGE_COLUMNS = 4
"""Two that fix the range, and two of zero: the kernel takes the columns in fours."""
_KEPT_ROWS = 64
"""Views of decode steps are kept: making them anew takes a tenth of a one-row product."""


class _Rooms(threading.local):
    """Padded activations by shape. Shared by all linears of a thread, as one runs at a time."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._largest: dict[int, Tensor] = {}

    def take(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return [rows, length + 4], whose last columns are 1, -1, 0 and 0, and its first ``length`` columns."""
        views = self._views.get((rows, length))
        if views is None:
            with torch.inference_mode(False):  # else what is made inside that mode could not be written outside it
                views = self._make(rows, length)
            if rows <= _KEPT_ROWS:
                self._views[rows, length] = views
        return views

    def _make(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        room = self._largest.get(length)
        if room is None or room.shape[0] < rows:
            room = self._largest[length] = torch.zeros(rows, length + _RANGE_COLUMNS)
            room[:, length] = 1
            room[:, length + 1] = -1
        return room[:rows], room[:rows, :length]


_rooms = _Rooms()


def is_available() -> bool:
    """Return whether this build of torch has the FBGEMM engine."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack(weight: Tensor) -> torch.ScriptObject:
    """Round a weight to int8 with one scale a row, and pack it for FBGEMM.

    Args:
        weight: [N, K] fp32 on the CPU.
    """
    scale = weight.abs().amax(dim=1).clamp_(min=_TINY) / 127
    rounded = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # Quantised tensors are deprecated as a user-facing type; the packed kernels take no other input.
        warnings.filterwarnings("ignore", message=".*quantize.*", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*quantize.*", category=DeprecationWarning)
        torch.backends.quantized.engine = "fbgemm"
        try:
            zero_points = torch.zeros(len(scale), dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zero_points, 0)
            return torch.ops.quantized.linear_prepack(tensor, None)
        finally:
            torch.backends.quantized.engine = engine


class Int8Linear:
    """``x @ weight.T + bias`` with 8-bit products and 32-bit sums; fp32 in and out.

    Args:
        weight: [N, K] fp32 on the CPU; not kept.
        bias: [N] fp32 or None.
    """

    keeps_weight = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = pack(torch.nn.functional.pad(weight, (0, _RANGE_COLUMNS)))
        self._bias = bias
        self._out_features = weight.shape[0]
        self.held_bytes = (
            weight.shape[0] * (weight.shape[1] + _RANGE_COLUMNS)
            + 8 * weight.shape[0]
            + (0 if bias is None else bias.nbytes)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]; a row that is not finite gives one that is not finite."""
        # FBGEMM skips NaN when it looks for the scale and rounds it to something finite. The row's own scale is NaN
        # then, and brings the fault back; hence also for a single row.
        largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)
        padded, front = _rooms.take(x.shape[0], x.shape[1])
        torch.div(x, largest, out=front)
        try:
            y: Tensor = torch.ops.quantized.linear_dynamic(padded, self._packed, False)
        except RuntimeError:
            # It refuses an input in which nothing is finite. That must fail these rows, not the step.
            if torch.isfinite(largest).any():
                raise
            return x.new_full((x.shape[0], self._out_features), torch.nan)
        return y.mul_(largest) if self._bias is None else torch.addcmul(self._bias, y, largest)

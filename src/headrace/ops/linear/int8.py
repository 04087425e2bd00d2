"""Dynamic 8-bit linear on CPUs: int8 weights with a scale for each output, activations rounded at each call.

FBGEMM's kernel (VNNI) takes one activation scale for the whole batch. That is harmless for one row; among several,
one row with a large value (the first token of most models has one) would rob the others of their precision. So each
row is first divided by its largest magnitude, which makes the one scale fit every row. Must not be used on a GPU.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_TINY = 1e-20


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
        self._packed = pack(weight)
        self._bias = bias
        self._out_features = weight.shape[0]
        self.held_bytes = weight.numel() + 8 * weight.shape[0] + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]; a row that is not finite gives one that is not finite."""
        # FBGEMM skips NaN when it looks for the scale and rounds it to something finite. The row's own scale is NaN
        # then, and brings the fault back; hence also for a single row.
        largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)
        try:
            y: Tensor = torch.ops.quantized.linear_dynamic(x / largest, self._packed, False)
        except RuntimeError:
            # It refuses an input in which nothing is finite. That must fail these rows, not the step.
            if torch.isfinite(largest).any():
                raise
            return x.new_full((x.shape[0], self._out_features), torch.nan)
        return y.mul_(largest) if self._bias is None else torch.addcmul(self._bias, y, largest)

"""Dense linear on weights that oneDNN has packed once: fp32 and bf16 on CPUs.

Two reasons to be. bf16: torch's own linear repacks at every call. fp32: oneDNN's packed kernel sums each output in
one order whatever the number of rows (from 2 up), so it gives batch-invariant results at nearly full speed, where MKL
changes the order with the number of rows. That is a property of the installed build, so `keeps_bits` checks it before
it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HINT_ROWS = 16
_PROBE_ROWS = (2, 3, 5, 8, 16, 17, 33, 64, 96)
_probed: dict[tuple[int, int, int], bool] = {}


def is_available(dtype: torch.dtype) -> bool:
    """Return whether this build and CPU have packed kernels for a type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear:
    """``x @ weight.T + bias`` on a packed copy of the weight.

    Args:
        weight: [N, K] on the CPU, fp32 or bf16; not kept.
        bias: [N] or None.
        invariant: compute a single row as two, because one row takes another kernel.
    """

    keeps_weight = False

    def __init__(self, weight: Tensor, bias: Tensor | None, *, invariant: bool = False) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT_ROWS)
        self._bias = bias
        self._invariant = invariant
        self.held_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, K]."""
        if self._invariant and x.shape[0] == 1:
            return self._run(x.expand(2, -1).contiguous())[:1]
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def keeps_bits(out_features: int, in_features: int) -> bool:
    """Return whether the packed fp32 kernel gives a row the same bits at every number of rows and every place.

    The order of sums depends on the shape and the number of threads, not on the values, so random values decide it.
    The answer is remembered for the shape and the current number of threads.
    """
    key = (out_features, in_features, torch.get_num_threads())
    if key not in _probed:
        _probed[key] = _probe(out_features, in_features)
    return _probed[key]


def _probe(out_features: int, in_features: int) -> bool:
    generator = torch.Generator().manual_seed(20)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(max(_PROBE_ROWS), in_features, generator=generator)
    run = PackedLinear(weight, None, invariant=True)
    whole = run(x)
    if not torch.equal(run(x.flip(0)).flip(0), whole):
        return False
    if not torch.equal(run(x[:1]), whole[:1]):
        return False
    return all(torch.equal(run(x[-rows:]), whole[-rows:]) for rows in _PROBE_ROWS)

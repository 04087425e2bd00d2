"""RMS norm through torch's operators, on any device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension; see `ops.norm.reference`.

    Args:
        x: [..., H].
        weight: [H], same type as ``x``.
        eps: added to the mean square.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head, with a weight per head.

    Args:
        x: [T, heads, D].
        weight: [heads, D].
        eps: added to the mean square.
    """
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)

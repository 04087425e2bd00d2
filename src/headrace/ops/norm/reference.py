"""RMS norm in fp32, written for reading. The oracle; must not be fast."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv 1910.07467).

    Args:
        x: [..., H].
        weight: [H], or any shape that broadcasts to ``x``.
        eps: added to the mean square.
    """
    wide = x.float()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return (wide / scale * weight.float()).to(x.dtype)

"""Operations on the rows of a logits matrix, each quick on its device and independent of the other rows.

On a CPU numpy's argmax, sort and partition are several times faster than torch's, so tensors are viewed as arrays
there. Sums are taken over fixed blocks of a row: a plain reduction may be split between threads when a batch has one
row, and its last bit would then depend on the batch. Must not know requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

SUM_BLOCK_TOKENS = 64


def to_device(array: npt.NDArray, like: Tensor) -> Tensor:
    """Return an array as a tensor on the device of ``like``."""
    tensor = torch.from_numpy(array)
    return tensor if like.device.type == "cpu" else tensor.to(like.device, non_blocking=True)


def row_argmax(logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the index of the first largest entry of each row, and its value. NaN counts as largest.

    Args:
        logits: [rows, vocab] float32, contiguous.
    """
    if logits.device.type == "cpu":
        values = logits.numpy()
        ids = values.argmax(axis=1)
        return ids, np.take_along_axis(values, ids[:, None], axis=1)[:, 0]
    ids_device = logits.argmax(dim=1)
    peaks = logits.gather(1, ids_device[:, None])[:, 0]
    return ids_device.cpu().numpy(), peaks.cpu().numpy()


def row_finite(logits: Tensor) -> npt.NDArray[np.bool_]:
    """Return which rows hold neither NaN nor an infinity.

    The sum of a row is finite only if all its entries are, so one cheap pass clears nearly every batch; a sum may
    overflow though every entry is finite, so suspects are looked at entry by entry.
    """
    finite = torch.isfinite(logits.sum(dim=1)).cpu().numpy()
    if not finite.all():
        suspects = np.flatnonzero(~finite)
        finite[suspects] = torch.isfinite(logits[to_device(suspects, logits)]).all(dim=1).cpu().numpy()
    return finite


def row_count_above(values: Tensor, limits: Tensor) -> npt.NDArray[np.int64]:
    """Return how many entries of each row are above its limit.

    Args:
        values: [rows, columns].
        limits: [rows, 1].
    """
    if values.device.type == "cpu":
        return np.count_nonzero(values.numpy() > limits.numpy(), axis=1)
    return (values > limits).sum(dim=1).cpu().numpy()


def row_sorted(values: Tensor) -> Tensor:
    """Return the rows sorted in descending order."""
    if values.device.type == "cpu":
        ascending = np.sort(values.numpy(), axis=1)
        return torch.from_numpy(np.ascontiguousarray(ascending[:, ::-1]))
    return values.sort(dim=1, descending=True).values


def row_top_columns(values: Tensor, count: int) -> Tensor:
    """Return the columns of the ``count`` largest entries of each row, in ascending column order.

    Which of several equal entries at the boundary are taken is unspecified.
    """
    if values.device.type == "cpu":
        array = values.numpy()
        columns = np.argpartition(array, array.shape[1] - count, axis=1)[:, array.shape[1] - count :]
        return torch.from_numpy(np.sort(columns, axis=1))
    return values.topk(count, dim=1, sorted=False).indices.sort(dim=1).values


def fold_columns(values: Tensor, columns: int, fill: float) -> Tensor:
    """Pad rows with ``fill`` to a multiple of ``columns``. No copy if they fit already."""
    surplus = -values.shape[1] % columns
    return F.pad(values, (0, surplus), value=fill) if surplus else values


def block_sums(weights: Tensor) -> Tensor:
    """Return sums over blocks of `SUM_BLOCK_TOKENS` columns.

    Args:
        weights: [rows, blocks * SUM_BLOCK_TOKENS] float32.

    Returns:
        [rows, blocks] float64.
    """
    return weights.view(weights.shape[0], -1, SUM_BLOCK_TOKENS).sum(dim=2).double()


def row_mass(scaled: Tensor) -> Tensor:
    """Return the sum of exp over each row, [rows] float64.

    Args:
        scaled: [rows, vocab] float32, at most 0.
    """
    return block_sums(fold_columns(scaled.exp(), SUM_BLOCK_TOKENS, 0.0)).sum(dim=1)

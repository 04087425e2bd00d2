"""Counter-based random numbers: one number for each (seed, output position), computed, never drawn from a stream.

No state: batch, slot, preemption and restart cannot change a number. Must not import torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_POSITION_STEP = np.uint64(0xD1342543DE82EF95)
_MASK = (1 << 64) - 1


def fold_seed(seed: int) -> int:
    """Return a seed of any size and sign as an unsigned 64-bit number."""
    return (seed ^ (seed >> 64 if seed >= 0 else 0)) & _MASK


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_A
    words = (words ^ (words >> np.uint64(27))) * _MIX_B
    return words ^ (words >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one uniform number in [0, 1) for each row.

    The seed is mixed before the position comes in, so that neighbouring seeds give unrelated sequences.

    Args:
        seeds: [rows], from `fold_seed`.
        positions: [rows], index of the output token to be sampled, from 0.

    Returns:
        [rows] multiples of 2**-53.
    """
    keys = _mix(seeds + _GOLDEN)
    words = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _POSITION_STEP)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

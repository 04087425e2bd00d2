"""Gives memory that the C library keeps for later back to the system. Must not import torch.

A step allocates and frees tensors of many sizes. glibc keeps the pieces; under load the resident memory of a CPU worker
grew from 0.6 to 1.1 GiB in three minutes without a leak. A trim takes about 10 ms and keeps it flat.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

TRIM_INTERVAL_S = 10.0


def find_trim() -> Callable[[], None]:
    """Return what gives free heap memory back; with a C library other than glibc it does nothing."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda: None
    return lambda: malloc_trim(0)


class HeapTrimmer:
    """Trims the heap between steps, at most once an interval.

    Args:
        now_s: monotonic seconds.
        trim: what to call.
        interval_s: seconds between two calls.
    """

    def __init__(
        self, now_s: float, trim: Callable[[], None] | None = None, interval_s: float = TRIM_INTERVAL_S
    ) -> None:
        self._trim = find_trim() if trim is None else trim
        self._interval_s = interval_s
        self._due_s = now_s + interval_s

    def tick(self, now_s: float) -> None:
        """Trim if the interval is over.

        Args:
            now_s: monotonic seconds.
        """
        if now_s >= self._due_s:
            self._trim()
            self._due_s = now_s + self._interval_s

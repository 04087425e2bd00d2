"""Clocks. The control plane gets time passed in; whoever passes it in takes it from here."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock. On Linux it is comparable between processes."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the current manual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds``."""
        self._now_s += seconds

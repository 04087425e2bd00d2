"""When Python's cyclic garbage collector walks through everything: while the core is idle, not in the middle of a step.

A full collection visits every container that is alive, and a busy core has many: it would be by far the longest step.
The engine makes hardly any reference cycles, so what waits is small. Must not be used in a process of the user's.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 700
MIDDLE_PASSES = 10
_NEVER_PASSES = 1 << 30
REST_S = 10.0
"""Seconds between full collections of an idle core."""
LATEST_S = 600.0
"""Seconds after which a core that is never idle collects all the same."""


class Collector:
    """Owns the settings of the collector in this process."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._thresholds = gc.get_threshold()

    def settle(self, now_s: float) -> None:
        """Leave what is alive now alone for good (modules, model, pools), and take full collections over.

        Args:
            now_s: monotonic seconds.

        Mutates: the collector of this process.
        """
        gc.collect()
        gc.freeze()
        # Young objects are few at a time and cheap; without that, cycles would pile up between full collections.
        gc.set_threshold(YOUNG_OBJECTS, MIDDLE_PASSES, _NEVER_PASSES)
        self._last_s = now_s

    def close(self) -> None:
        """Give the collector back to Python as it was.

        Mutates: the collector of this process.
        """
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def rest(self, now_s: float) -> None:
        """The core has nothing to do: collect, if that was not done lately."""
        if now_s - self._last_s >= REST_S:
            self._collect(now_s)

    def stepped(self, now_s: float) -> None:
        """A step has ended: collect only if that is long overdue."""
        if now_s - self._last_s >= LATEST_S:
            self._collect(now_s)

    def _collect(self, now_s: float) -> None:
        gc.collect()
        self._last_s = now_s

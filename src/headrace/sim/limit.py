"""A limit on the processor time of one run: a call that never returns is a finding like any other.

Must not be used for anything that shall be repeatable to the step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.sim.cells import SimFault

RUN_LIMIT_S = 60.0
"""Seconds of a whole run; one takes a tenth of a second."""


class EndlessFault(SimFault):
    """A run took far longer than any can."""


@contextmanager
def processor_limit(seconds: float = RUN_LIMIT_S) -> Iterator[None]:
    """Raise `EndlessFault` in what is done inside once it has taken so much processor time.

    Signals exist in the main thread and on POSIX alone; elsewhere nothing is limited.
    """
    if not hasattr(signal, "SIGVTALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise EndlessFault(f"a run has taken {seconds:g} seconds of processor time: some call never returns")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)

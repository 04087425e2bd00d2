"""The start-up table: where the time from process start to readiness went. Rows add up to wall time by construction.

Must not measure anything on its own account: each row is the time between two marks, so no second is lost or counted
twice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from headrace.types.wire import PhaseSeconds


def process_age_s() -> float:
    """Return seconds since this process was started by the operating system (10 ms resolution)."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            start_ticks = int(file.read().rpartition(")")[2].split()[19])
        # Start times count from boot. psutil's create_time() goes through the boot time in whole seconds instead.
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        import psutil

        return max(0.0, time.time() - float(psutil.Process().create_time()))


class StartupTable:
    """Phases of one process, from its start to the last mark.

    Args:
        title: whose start this is.
        age_s: seconds that the process has lived already; measured if not given.
    """

    def __init__(self, title: str, age_s: float | None = None) -> None:
        self.title = title
        now_s = time.monotonic()
        self._start_s = now_s - (process_age_s() if age_s is None else age_s)
        self._last_s = self._start_s
        self._rows: list[PhaseSeconds] = []

    @property
    def rows(self) -> list[PhaseSeconds]:
        """The phases so far, in order."""
        return list(self._rows)

    @property
    def total_s(self) -> float:
        """Seconds from process start to the last mark; the sum of all rows."""
        return self._last_s - self._start_s

    def mark(self, name: str) -> float:
        """End a phase: the time since the last mark goes to ``name``. Return these seconds."""
        now_s = time.monotonic()
        spent_s = now_s - self._last_s
        self._last_s = now_s
        self._rows.append(PhaseSeconds(name, spent_s))
        return spent_s

    def mark_parts(self, parts: Sequence[PhaseSeconds], before: str) -> float:
        """End a phase whose last parts were measured elsewhere; what they leave of its time came ``before`` them.

        Parts that claim more than the wall time (measured in parallel) are scaled to it, so that the sum stays true.
        """
        now_s = time.monotonic()
        spent_s = now_s - self._last_s
        self._last_s = now_s
        claimed_s = sum(part.seconds for part in parts)
        scale = min(1.0, spent_s / claimed_s) if claimed_s > 0 else 1.0
        self._rows.append(PhaseSeconds(before, max(0.0, spent_s - claimed_s * scale)))
        self._rows.extend(PhaseSeconds(part.name, part.seconds * scale) for part in parts)
        return spent_s


def print_startup(tables: Sequence[tuple[str, Sequence[PhaseSeconds]]], stream: TextIO | None = None) -> None:
    """Print one table: a section for each process, its phases, and the sum.

    Args:
        tables: (title, rows) of each process.
        stream: where to; standard error by default.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Start-up", title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for title, rows in tables:
        for row in rows:
            table.add_row(f"  {row.name}", f"{row.seconds:.2f}")
        table.add_row(f"[bold]{title}[/bold]", f"[bold]{sum(row.seconds for row in rows):.2f}[/bold]")
    Console(file=stream if stream is not None else sys.stderr, highlight=False).print(table)

"""Run simulator seeds one after the other and stop at the first fault; a program of its own, run on a mutated copy.

    python sim_driver.py SEEDS STEPS

Exit codes: 0 nothing found, 1 a seed failed or something was never covered, 3 the package does not import. A chunk of
seeds that takes far too long ends the process by SIGALRM.
"""

from __future__ import annotations

import signal
import sys

CHUNK_SEEDS = 10
CHUNK_LIMIT_S = 60.0
"""A chunk takes a second or two; on a busy machine some more."""


def main() -> int:
    """Run the seeds and say what was found."""
    seeds, steps = int(sys.argv[1]), int(sys.argv[2])
    signal.setitimer(signal.ITIMER_REAL, CHUNK_LIMIT_S)
    try:
        from headrace.sim.campaign import Tally, run_chunk
    except Exception as error:  # a mutant that is no program at all
        print(f"does not import: {error!r}")
        return 3
    total = Tally()
    for first in range(0, seeds, CHUNK_SEEDS):
        signal.setitimer(signal.ITIMER_REAL, CHUNK_LIMIT_S)
        total.add(run_chunk(range(first, min(first + CHUNK_SEEDS, seeds)), steps))
        if total.failed_seed is not None:
            failure = total.failure
            print(f"seed {total.failed_seed}: {failure.where if failure else ''}: {failure.error if failure else ''}")
            return 1
    missing = total.empty_cells()
    if missing:
        print(f"never happened in {seeds} seeds: {', '.join(missing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A thousand fixed seeds and two hundred fresh ones; and proof that the interesting things really happened."""

from __future__ import annotations

import os

from headrace.sim.campaign import Tally, run_seeds

FIXED_SEEDS = 1000
FRESH_SEEDS = 200
FEWEST_STEPS = 40
"""A seed begins like the longer run of ``headrace sim``."""


def run(first: int, seeds: int) -> Tally:
    processes = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    tally = run_seeds(first, seeds, least_steps=FEWEST_STEPS, processes=processes)
    seed = tally.failed_seed
    assert seed is None, f"{tally.failure}; repeat: headrace sim --seed {seed} --steps {FEWEST_STEPS} --trace"
    return tally


def test_fixed_seeds_hold_every_invariant() -> None:
    tally = run(0, FIXED_SEEDS)
    assert tally.seeds == FIXED_SEEDS
    missing = tally.empty_cells()
    assert not missing, f"never happened: {missing} in {dict(tally.counts)}"


def test_fresh_seeds_hold_every_invariant() -> None:
    """Other seeds each time; a failure names its own."""
    first = int.from_bytes(os.urandom(4), "little")
    print(f"fresh seeds {first}..{first + FRESH_SEEDS - 1}")
    run(first, FRESH_SEEDS)

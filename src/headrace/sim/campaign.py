"""Many seeds, on several processes: what was covered, and the first seed that fails.

The result is the same for every number of processes: seeds are taken in blocks, and the answers are read in order. Must
not print.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations, count
from multiprocessing import get_context

from headrace.base.clock import Clock
from headrace.sim.cover import common_cells, rare_cells
from headrace.sim.features import FEATURES
from headrace.sim.limit import EndlessFault, processor_limit
from headrace.sim.replay import Failure, Run, failure_of, replay, shrink
from headrace.sim.story import Story
from headrace.sim.swarm import Swarm

CHUNK_SEEDS = 10
JUDGED_FROM_STEPS, RARE_FROM_STEPS, PAIRS_FROM_SEEDS = 60_000, 250_000, 1000
"""Shorter campaigns may miss a rare thing by chance."""


@dataclass
class Tally:
    """What some seeds have shown.

    Attributes:
        seeds: how many ran to their end.
        steps: steps of the device.
        counts: how often each cell of `headrace.sim.cover.cells` happened, and more.
        features: in how many runs each of `FEATURES` was on.
        pairs: in how many runs two of them were on together.
        seeds_with_evictions: runs in which memory was short enough to evict a cached block.
        failed_seed: the first seed that failed; nothing after it is counted.
        failure: how it failed.
    """

    seeds: int = 0
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    seeds_with_evictions: int = 0
    failed_seed: int | None = None
    failure: Failure | None = None

    def add(self, other: Tally) -> None:
        """Add what later seeds have shown."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.counts += other.counts
        self.features += other.features
        self.pairs += other.pairs
        self.seeds_with_evictions += other.seeds_with_evictions
        self.failed_seed, self.failure = other.failed_seed, other.failure

    def empty_cells(self) -> list[str]:
        """Return what never happened although there were seeds enough for it."""
        missing: list[str] = []
        if self.steps >= JUDGED_FROM_STEPS:
            missing += [name for name in common_cells() if not self.counts[name]]
            missing += [name for name in FEATURES if not self.features[name]]
        if self.steps >= RARE_FROM_STEPS:
            missing += [name for name in rare_cells() if not self.counts[name]]
        if self.seeds >= PAIRS_FROM_SEEDS:
            missing += [f"{one} with {other}" for one, other in all_pairs() if not self.pairs[one, other]]
        return missing


def all_pairs() -> list[tuple[str, str]]:
    """Return every two features, in alphabetical order."""
    return list(combinations(sorted(FEATURES), 2))


def run_chunk(seeds: range, least_steps: int) -> Tally:
    """Run seeds in this process, up to the first that fails.

    Args:
        seeds: in order.
        least_steps: of each, as in `Swarm.run`.
    """
    tally = Tally()
    for seed in seeds:
        swarm = Swarm(seed)
        try:
            with processor_limit():
                counts = swarm.run(least_steps)
        except Exception as error:  # whatever the system under test raises is a finding
            tally.failed_seed, tally.failure = seed, failure_of(error, swarm.harness)
            break
        tally.seeds += 1
        tally.steps += counts["steps"]
        tally.counts += counts
        tally.features.update(swarm.features)
        tally.pairs.update(combinations(sorted(swarm.features), 2))
        tally.seeds_with_evictions += counts["evictions"] > 0
    return tally


def run_seeds(first_seed: int, seeds: int, *, least_steps: int, processes: int = 1) -> Tally:
    """Run a number of seeds in a row, up to the first that fails.

    Args:
        first_seed: where to begin.
        seeds: how many.
        least_steps: of each, as in `Swarm.run`.
        processes: 1 stays in this one.
    """
    end = first_seed + seeds
    chunks = (range(start, min(start + CHUNK_SEEDS, end)) for start in range(first_seed, end, CHUNK_SEEDS))
    return _sum(chunks, least_steps, min(processes, -(-seeds // CHUNK_SEEDS)))


def run_until(deadline_s: float, clock: Clock, first_seed: int, *, least_steps: int, processes: int = 1) -> Tally:
    """Run seeds in a row until a time has come, up to the first that fails; at least one chunk.

    Args:
        deadline_s: no seeds are started after it.
        clock: tells the time.
        first_seed: where to begin.
        least_steps: of each, as in `Swarm.run`.
        processes: 1 stays in this one.
    """

    def chunks() -> Iterator[range]:
        for start in count(first_seed, CHUNK_SEEDS):
            yield range(start, start + CHUNK_SEEDS)
            if clock.now_s() >= deadline_s:
                return

    return _sum(chunks(), least_steps, processes)


def _sum(chunks: Iterator[range], least_steps: int, processes: int) -> Tally:
    total = Tally()
    with closing(_tallies(chunks, least_steps, processes)) as tallies:
        for tally in tallies:
            total.add(tally)
            if total.failed_seed is not None:
                break
    return total


def _tallies(chunks: Iterator[range], least_steps: int, processes: int) -> Generator[Tally, None, None]:
    """Yield the answers in the order of the chunks; no more than a few are under way."""
    if processes == 1:
        for chunk in chunks:
            yield run_chunk(chunk, least_steps)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_interrupts_to_the_parent) as pool:
        under_way: deque[Future[Tally]] = deque()
        try:
            for chunk in chunks:
                under_way.append(pool.submit(run_chunk, chunk, least_steps))
                if len(under_way) > 2 * processes:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class Finding:
    """A failing seed, run again and cut down.

    Attributes:
        failure: as the run of the seed has it.
        run: the whole run, up to the failure.
        shrunk: a smaller one that fails in the same place.
    """

    failure: Failure
    run: Run
    shrunk: Run

    def tell(self, story: Story) -> Failure | None:
        """Run what is left once more, with its story; return how it fails."""
        return replay(self.shrunk, story)[0]


def examine(seed: int, *, least_steps: int, story: Story | None = None) -> Finding | Tally:
    """Run one seed in this process.

    Args:
        seed: which.
        least_steps: as in `Swarm.run`; a failure comes at the same event whatever it is, if it comes.
        story: is told all that happens in the whole run.

    Returns:
        The finding if it fails, else its coverage.
    """
    swarm = Swarm(seed, story=story)
    try:
        with processor_limit():
            counts = swarm.run(least_steps)
    except Exception as error:  # whatever the system under test raises is a finding
        failure, run = failure_of(error, swarm.harness), Run(swarm.setup, tuple(swarm.harness.actions))
        # Each attempt to shorten a run without an end would take the whole limit.
        shrunk = run if isinstance(error, EndlessFault) else shrink(run, failure)
        return Finding(failure, run, shrunk)
    pairs = Counter(combinations(sorted(swarm.features), 2))
    return Tally(1, counts["steps"], counts, Counter(swarm.features), pairs, int(counts["evictions"] > 0))

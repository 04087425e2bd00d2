"""``headrace sim``: run the simulator on many seeds, or tell the story of one; the last line is one JSON document.

Must not simulate anything itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.cli.parser import CommandParser
from headrace.cli.present import EXIT_FAILED, EXIT_OK, UsageError
from headrace.config.flags import section_from
from headrace.config.option import option

if TYPE_CHECKING:
    from headrace.sim.campaign import Finding, Tally
    from headrace.sim.setup import SimSetup

SCHEMA = 1


@dataclass(frozen=True)
class SimOptions:
    """Which seeds to run."""

    seeds: int | None = option(None, "Run so many seeds in a row [1000, if neither --seed nor --minutes].", low=1)
    first_seed: int = option(0, "The first seed of --seeds.", low=0)
    seed: int | None = option(None, "Run this seed alone.", low=0)
    minutes: float | None = option(None, "Run fresh seeds until so many minutes are over.", low=0)
    steps: int = option(200, "Every run has at least so many steps that compute something.", low=0)
    trace: bool = option(False, "Tell the story of the run; with --seed.")
    processes: int | None = option(None, "Processes; the result does not depend on it [2 if there are cores].", low=1)


def build_parser() -> CommandParser:
    """Return the parser of this command."""
    about = (
        "Drive the real scheduler and KV bookkeeping at random, on pools of a few blocks, against a device that knows "
        "what every KV slot must contain. Exit code 1 if a seed fails, or if something was never covered."
    )
    parser = CommandParser("sim", about)
    parser.add_topic("sim", SimOptions)
    return parser


def run(argv: list[str]) -> int:
    """Run the seeds, print coverage and findings; return 1 if there is something to mend, else 0.

    Raises:
        UsageError: flags that exclude one another.
    """
    options = section_from(build_parser().parse(argv), SimOptions)
    chosen = [name for name in ("seeds", "seed", "minutes") if getattr(options, name) is not None]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} exclude one another")
    if options.trace and options.seed is None:
        raise UsageError("--trace needs --seed: it tells the story of one run")
    if options.first_seed and (options.seed is not None or options.minutes is not None):
        raise UsageError("--first-seed needs --seeds")
    return _one(options.seed, options) if options.seed is not None else _many(options)


def _one(seed: int, options: SimOptions) -> int:
    """Run one seed, with its story if wanted."""
    from headrace.base.clock import SystemClock
    from headrace.sim.campaign import Tally, examine
    from headrace.sim.story import Story
    from headrace.sim.swarm import Swarm

    clock = SystemClock()
    started_s = clock.now_s()
    if options.trace:
        print(f"seed {seed}: {describe(Swarm(seed).setup)}\n")
    found = examine(seed, least_steps=options.steps, story=Story(print) if options.trace else None)
    if isinstance(found, Tally):
        tally, finding = found, None
    else:
        tally, finding = Tally(failed_seed=seed, failure=found.failure), found
    return _conclude(tally, finding, options, first_seed=seed, seconds=clock.now_s() - started_s)


def _many(options: SimOptions) -> int:
    """Run seeds in a row; the first that fails is run again here and cut down."""
    from headrace.base.clock import SystemClock
    from headrace.sim.campaign import Tally, examine, run_seeds, run_until

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = options.processes or min(2, cores)
    clock = SystemClock()
    started_s = clock.now_s()
    if options.minutes is not None:
        first_seed = int.from_bytes(os.urandom(4), "little")
        print(f"fresh seeds from {first_seed} on", flush=True)
        end_s = started_s + 60 * options.minutes
        tally = run_until(end_s, clock, first_seed, least_steps=options.steps, processes=processes)
    else:
        first_seed = options.first_seed
        seeds = options.seeds or 1000
        tally = run_seeds(first_seed, seeds, least_steps=options.steps, processes=processes)
    found: Finding | Tally | None = None
    if tally.failed_seed is not None:
        found = examine(tally.failed_seed, least_steps=options.steps)
    finding = None if isinstance(found, Tally) else found
    return _conclude(tally, finding, options, first_seed=first_seed, seconds=clock.now_s() - started_s)


def _conclude(tally: Tally, finding: Finding | None, options: SimOptions, *, first_seed: int, seconds: float) -> int:
    import json

    from headrace.sim.campaign import all_pairs
    from headrace.version import __version__

    if tally.seeds:
        print(coverage_table(tally))
    if tally.failed_seed is not None:
        _print_failure(tally, finding, options)
    missing = tally.empty_cells()
    for name in missing:
        print(f"NEVER HAPPENED: {name}")
    failure = tally.failure
    document: dict[str, Any] = {
        "kind": "sim",
        "schema": SCHEMA,
        "headrace": __version__,
        "first_seed": first_seed,
        "seeds": tally.seeds,
        "steps": tally.steps,
        "seconds": round(seconds, 3),
        "counts": dict(sorted(tally.counts.items())),
        "features": dict(sorted(tally.features.items())),
        "pairs": len(all_pairs()),
        "pairs_drawn": sum(tally.pairs[pair] > 0 for pair in all_pairs()),
        "seeds_with_evictions": tally.seeds_with_evictions,
        "never_happened": missing,
        "failed_seed": tally.failed_seed,
        "failed_step": failure.step if failure else None,
        "error": failure.error if failure else None,
        "events": len(finding.run.actions) if finding else None,
        "events_shrunk": len(finding.shrunk.actions) if finding else None,
    }
    print(json.dumps(document), flush=True)
    return EXIT_FAILED if missing or tally.failed_seed is not None else EXIT_OK


def _print_failure(tally: Tally, finding: Finding | None, options: SimOptions) -> None:
    """Say how a seed fails, show the shortest run that was found, and how to repeat it."""
    from headrace.sim.story import Story

    failure = tally.failure
    if failure is None:
        return
    print(f"\nFAILED: seed {tally.failed_seed}, step {failure.step}, {failure.where}: {failure.error}")
    if finding is None:
        print("It did not fail again in this process: something depends on more than the seed.")
    else:
        events, enough = len(finding.run.actions), len(finding.shrunk.actions)
        print(f"{enough} of its {events} events are enough to fail there:\n")
        print(describe(finding.shrunk.setup))
        again = finding.tell(Story(print))
        if again is not None:
            print(f"step {again.step} FAILED: {again.error}")
    steps = "" if options.steps == SimOptions.steps else f" --steps {options.steps}"
    print(f"\nto repeat it:\n  headrace sim --seed {tally.failed_seed} --trace{steps}\n")


def describe(setup: SimSetup) -> str:
    """Return sizes, options and faults of a run, as text for people."""
    scheduler, layout = setup.scheduler, setup.layout
    groups = [
        f"{kind} ({group.block_tokens or 'a state'} tokens in {group.block_granules} granules)"
        for kind, group in zip(setup.kinds, layout.groups, strict=True)
    ]
    extents = f"{layout.num_extents} extents of {layout.extent_granules} granules"
    return "\n".join(
        [
            f"after {setup.template}: {', '.join(groups)}; {extents}",
            f"{scheduler.max_num_seqs} slots, {scheduler.max_num_batched_tokens} tokens a step, "
            f"{scheduler.steps_in_flight} steps in flight, policy {scheduler.policy}, queue {scheduler.max_queue}, "
            f"watermark {scheduler.watermark}, prefill part {scheduler.long_prefill_token_threshold or 'any'}",
            f"longest {setup.max_model_len} tokens, vocabulary {setup.vocab_tokens}, "
            f"prefix cache {'on' if setup.prefix_caching else 'off'}, store {setup.store}, "
            f"encoder rows {setup.encoder_rows} and {setup.encoder_budget_rows} a step",
            f"faults: {', '.join(sorted(setup.sites)) or 'none'}",
        ]
    )


def coverage_table(tally: Tally) -> str:
    """Return what happened how often, as text for people."""
    from headrace.sim.campaign import all_pairs
    from headrace.sim.cover import common_cells, rare_cells
    from headrace.sim.features import FEATURES

    cells = [*common_cells(), *rare_cells()]
    more = sorted(set(tally.counts) - set(cells))
    lines = [f"{tally.seeds} seeds, {tally.steps} steps, evictions in {tally.seeds_with_evictions} seeds", ""]
    lines += _columns([(name, tally.counts[name]) for name in cells])
    lines += ["", "beside these"]
    lines += _columns([(name, tally.counts[name]) for name in more])
    lines += ["", "runs with"]
    lines += _columns([(name, tally.features[name]) for name in FEATURES])
    drawn = sum(tally.pairs[pair] > 0 for pair in all_pairs())
    return "\n".join([*lines, "", f"{drawn} of {len(all_pairs())} pairs of these drawn together"])


def _columns(cells: list[tuple[str, int]]) -> list[str]:
    """Lay (name, number) out in two columns."""
    rows = -(-len(cells) // 2)
    lines: list[str] = []
    for row in range(rows):
        pair = cells[row::rows]
        lines.append("".join(f"  {name:<38} {count:>9}" for name, count in pair))
    return lines

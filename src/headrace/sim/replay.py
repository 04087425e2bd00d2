"""Run recorded actions again, say how they fail, and cut them down to the few that matter.

Must not draw anything at random: the same actions give the same run.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from headrace.sim.actions import Action
from headrace.sim.harness import Harness, SimSetup
from headrace.sim.story import Story

SHRINK_LIMIT_STEPS = 20_000
"""Steps that all attempts of one shrinking may take together: some seconds."""


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    Attributes:
        step: number of the step that was planned, executed or applied.
        error: type and text of the exception.
        where: file and line that complained; two runs that agree in it are taken to fail for the same reason.
    """

    step: int
    error: str
    where: str


def failure_of(error: Exception, harness: Harness) -> Failure:
    """Return what is known of an exception that ended a run."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name not in ("demand", "invariant")]
    where = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"
    text = " ".join(str(error).split())
    return Failure(harness.at_step, f"{type(error).__name__}: {text}", where)


def replay(setup: SimSetup, actions: Sequence[Action], story: Story | None = None) -> tuple[Failure | None, int]:
    """Do the actions and then whatever is left to do.

    Args:
        setup: sizes and options of the run.
        actions: in order; those that are not possible are passed over.
        story: is told all that happens.

    Returns:
        How it failed, or None; and the steps that it took.
    """
    harness = Harness(setup, story)
    try:
        for action in actions:
            harness.do(action)
        harness.drain()
    except Exception as error:  # whatever the system under test raises is a finding
        return failure_of(error, harness), harness.device.executed_steps
    return None, harness.device.executed_steps


def shrink(setup: SimSetup, actions: Sequence[Action], failure: Failure) -> list[Action]:
    """Leave out actions as long as the run fails in the same place.

    Halves are tried first, then quarters and so on down to single actions, as in delta debugging (Zeller and
    Hildebrandt, 2002). What is left need not be the shortest run, but no piece of the last size can be missed.

    Args:
        setup: sizes and options of the run.
        actions: of the failing run.
        failure: how it fails.

    Returns:
        A part of ``actions`` that fails in the same place; all of them if nothing can go.
    """
    kept, steps = list(actions), 0
    size = max(1, len(kept) // 2)
    while steps < SHRINK_LIMIT_STEPS:
        place, shrunk = 0, False
        while place < len(kept) and steps < SHRINK_LIMIT_STEPS:
            shorter = kept[:place] + kept[place + size :]
            found, took = replay(setup, shorter)
            steps += took + 1
            if found is not None and found.where == failure.where:
                kept, shrunk = shorter, True
            else:
                place += size
        if size == 1 and not shrunk:
            break
        size = max(1, size // 2)
    return kept

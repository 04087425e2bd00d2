"""Run recorded actions again, say how they fail, and cut them down to the few that matter.

Must not draw anything at random: the same actions give the same run.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

import msgspec

from headrace.base.errors import HeadraceError
from headrace.sim.actions import Action, ActionKind
from headrace.sim.harness import Harness
from headrace.sim.limit import processor_limit
from headrace.sim.setup import SimSetup
from headrace.sim.story import Story
from headrace.types.requests import EngineRequest

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


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        setup: sizes, options and faults.
        actions: in order; those that are not possible are passed over.
    """

    setup: SimSetup
    actions: tuple[Action, ...]


def failure_of(error: Exception, harness: Harness) -> Failure:
    """Return what is known of an exception that ended a run."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name not in ("demand", "invariant")]
    where = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"
    text = " ".join(str(error).split())
    return Failure(harness.at_step, f"{type(error).__name__}: {text}", where)


def replay(run: Run, story: Story | None = None) -> tuple[Failure | None, int]:
    """Do the actions and then whatever is left to do.

    Args:
        run: what was recorded.
        story: is told all that happens.

    Returns:
        How it failed, or None; and the steps that it took.
    """
    harness = Harness(run.setup, story)
    try:
        with processor_limit():
            for action in run.actions:
                harness.do(action)
            harness.drain()
    except Exception as error:  # whatever the system under test raises is a finding
        return failure_of(error, harness), harness.steps
    return None, harness.steps


class _Shrinker:
    """Tries smaller runs as long as they fail in the same place."""

    def __init__(self, run: Run, failure: Failure) -> None:
        self.run = run
        self._where = failure.where
        self._steps = 0

    @property
    def tired(self) -> bool:
        return self._steps >= SHRINK_LIMIT_STEPS

    def attempt(self, smaller: Run) -> bool:
        """Keep a smaller run if it still fails."""
        try:
            found, took = replay(smaller)
        except HeadraceError:  # sizes that do not fit together
            return False
        self._steps += took + 1
        if found is None or found.where != self._where:
            return False
        self.run = smaller
        return True

    def leave_out(self, pieces: Callable[[Action], object]) -> None:
        """Leave out all actions that belong together."""
        for key in dict.fromkeys(pieces(action) for action in self.run.actions):
            if key is None or self.tired:
                continue
            left = tuple(action for action in self.run.actions if pieces(action) != key)
            self.attempt(dataclasses.replace(self.run, actions=left))

    def halve(self) -> bool:
        """Leave out halves, quarters and so on; return whether single actions could go."""
        size, shrunk = max(1, len(self.run.actions) // 2), False
        while not self.tired:
            place, shrunk = 0, False
            while place < len(self.run.actions) and not self.tired:
                actions = self.run.actions
                left = actions[:place] + actions[place + size :]
                if self.attempt(dataclasses.replace(self.run, actions=left)):
                    shrunk = True
                else:
                    place += size
            if size == 1 and not shrunk:
                break
            size = max(1, size // 2)
        return shrunk

    def simplify(self) -> None:
        """Try plainer options, fewer faults, and plainer requests."""
        for setup in _plainer(self.run.setup):
            if not self.tired:
                self.attempt(dataclasses.replace(self.run, setup=setup(self.run.setup)))
        for place, action in enumerate(self.run.actions):
            for change in _simpler(action.source) if action.source else ():
                now = self.run.actions[place]
                if self.tired or now.source is None:
                    break
                changed = dataclasses.replace(now, source=change(now.source))
                if changed != now:
                    actions = (*self.run.actions[:place], changed, *self.run.actions[place + 1 :])
                    self.attempt(dataclasses.replace(self.run, actions=actions))


def shrink(run: Run, failure: Failure) -> Run:
    """Make a failing run smaller as long as it fails in the same place.

    Whole requests go first, then halves of the actions, quarters and so on down to single ones, as in delta debugging
    (Zeller and Hildebrandt, 2002), then options, faults and what requests bring, then single actions again. What is
    left need not be the shortest run, but no piece of the last size can be missed.

    Args:
        run: the failing one.
        failure: how it fails.

    Returns:
        A run that fails in the same place; the same one if nothing can go.
    """
    shrinker = _Shrinker(run, failure)
    shrinker.leave_out(lambda action: action.source.request_id if action.source else action.request_id)
    shrinker.halve()
    shrinker.simplify()
    shrinker.halve()
    return shrinker.run


def _plainer(setup: SimSetup) -> Iterator[Callable[[SimSetup], SimSetup]]:
    def with_scheduler(**changes: object) -> Callable[[SimSetup], SimSetup]:
        def change(now: SimSetup) -> SimSetup:
            return dataclasses.replace(now, scheduler=dataclasses.replace(now.scheduler, **changes))  # type: ignore[arg-type]

        return change

    yield lambda now: dataclasses.replace(now, sites=frozenset())
    for site in sorted(setup.sites):
        yield lambda now, site=site: dataclasses.replace(now, sites=now.sites - {site})  # type: ignore[misc]
    yield lambda now: dataclasses.replace(now, store="none")
    yield with_scheduler(steps_in_flight=1)
    yield with_scheduler(policy="fcfs")
    yield with_scheduler(watermark=0.0)
    yield with_scheduler(long_prefill_token_threshold=0)
    yield with_scheduler(max_queue=100)


def _simpler(source: EngineRequest) -> Iterator[Callable[[EngineRequest], EngineRequest]]:
    plain: dict[str, object] = {
        "media": [],
        "embeds": [],
        "adapter": None,
        "cache_salt": None,
        "tenant": None,
        "deadline_s": None,
        "grammar": None,
        "leader_id": None,
        "priority": 0,
    }
    # Hashes of the front end belong to the rest; the core computes what is missing.
    yield lambda now: msgspec.structs.replace(now, block_hashes=[])
    for name, value in plain.items():
        if getattr(source, name) != value:
            yield lambda now, name=name, value=value: msgspec.structs.replace(  # type: ignore[misc]
                now, block_hashes=[], **{name: value}
            )
    for tokens in (1, len(source.prompt_token_ids) // 2, len(source.prompt_token_ids) - 1):
        if 0 < tokens < len(source.prompt_token_ids) and not source.media and not source.embeds:
            yield (
                lambda now, tokens=tokens: msgspec.structs.replace(  # type: ignore[misc]
                    now, block_hashes=[], prompt_token_ids=now.prompt_token_ids[:tokens]
                )
            )


def request_adds(run: Run) -> int:
    """Return how many requests a run posts."""
    return sum(action.kind is ActionKind.ADD for action in run.actions)

"""Recorded runs, shrinking, and campaigns: the same answer every time and for every number of processes."""

from __future__ import annotations

import pytest

from headrace.kv.pool import BlockPool
from headrace.sim.actions import ActionKind
from headrace.sim.campaign import JUDGED_FROM_STEPS, RARE_FROM_STEPS, Finding, Tally, examine, run_seeds, run_until
from headrace.sim.cover import common_cells, rare_cells
from headrace.sim.features import FEATURES
from headrace.sim.limit import EndlessFault, processor_limit
from headrace.sim.replay import Run, replay
from headrace.sim.story import Story
from headrace.sim.swarm import Swarm, run_seed


class StepClock:
    """Time that moves by a second at every look."""

    def __init__(self) -> None:
        self.looks = 0

    def now_s(self) -> float:
        self.looks += 1
        return float(self.looks)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a hit are not pinned."""
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)


def told(seed: int, steps: int) -> list[str]:
    lines: list[str] = []
    Swarm(seed, story=Story(lines.append)).run(steps)
    return lines


def test_a_seed_is_a_run() -> None:
    first, second = told(5, 60), told(5, 60)
    assert first == second
    assert first != told(6, 60)
    assert run_seed(5, 60) == run_seed(5, 60)


def test_a_run_that_was_recorded_runs_again() -> None:
    swarm, lines, again = Swarm(5), [], []
    swarm.harness.story = Story(lines.append)
    swarm.run(60)
    recorded = Run(swarm.setup, tuple(swarm.harness.actions))
    assert replay(recorded, Story(again.append))[0] is None
    assert again == lines


@pytest.mark.parametrize("seed", range(4))
def test_enough_steps_compute_something(seed: int) -> None:
    swarm = Swarm(seed)
    swarm.run(120)
    assert swarm.harness.busy_steps >= 120
    assert swarm.features <= set(FEATURES)


def test_a_failing_run_is_cut_down_and_fails_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    tally = run_seeds(0, 60, least_steps=0)
    assert tally.failed_seed is not None
    found = examine(tally.failed_seed, least_steps=0)
    assert isinstance(found, Finding)
    assert found.failure == tally.failure
    assert len(found.shrunk.actions) < len(found.run.actions) / 2
    assert any(action.kind is ActionKind.ADD for action in found.shrunk.actions)
    lines: list[str] = []
    again = found.tell(Story(lines.append))
    assert again is not None
    assert again.where == found.failure.where
    monkeypatch.undo()
    assert found.tell(Story(lines.append)) is None, "the run is legal, so it passes when the code is right"


def test_no_single_event_of_a_shrunk_run_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    tally = run_seeds(0, 60, least_steps=0)
    assert tally.failed_seed is not None
    found = examine(tally.failed_seed, least_steps=0)
    assert isinstance(found, Finding)
    actions = found.shrunk.actions
    for place in range(len(actions)):
        failure, _ = replay(Run(found.shrunk.setup, actions[:place] + actions[place + 1 :]))
        assert failure is None or failure.where != found.failure.where


def test_the_number_of_processes_changes_nothing() -> None:
    assert run_seeds(3, 25, least_steps=20, processes=2) == run_seeds(3, 25, least_steps=20, processes=1)


def test_seeds_after_the_first_failure_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    few, many = (run_seeds(0, seeds, least_steps=0) for seeds in (60, 100))
    assert few == many
    assert few.seeds == few.failed_seed


def test_fresh_seeds_end_with_the_time() -> None:
    tally = run_until(3.0, StepClock(), 1000, least_steps=0)
    assert (tally.seeds, tally.failed_seed) == (30, None)


def test_an_empty_cell_counts_in_a_campaign_that_is_long_enough() -> None:
    assert Tally(steps=JUDGED_FROM_STEPS - 1).empty_cells() == []
    assert set(Tally(steps=JUDGED_FROM_STEPS).empty_cells()) == {*common_cells(), *FEATURES}
    assert set(Tally(steps=RARE_FROM_STEPS).empty_cells()) >= {*rare_cells(), *common_cells()}
    assert "adapters with salts" in Tally(seeds=1000).empty_cells()


def test_a_call_that_never_returns_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(self: BlockPool, blocks: object) -> None:
        while True:
            pass

    monkeypatch.setattr(BlockPool, "free", forever)
    with pytest.raises(EndlessFault, match="never returns"), processor_limit(0.05):
        run_seed(0)
    monkeypatch.undo()
    with processor_limit(30.0):
        run_seed(0)

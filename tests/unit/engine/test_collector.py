"""Full collections come when the core rests, or when they are long overdue, and at no other time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headrace.engine.collector import LATEST_S, REST_S, Collector


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    thresholds, seen = gc.get_threshold(), []
    monkeypatch.setattr(gc, "collect", lambda: seen.append(1))
    yield seen
    Collector().close()
    gc.set_threshold(*thresholds)


def test_full_collections_are_not_left_to_python(collections: list[int]) -> None:
    before, collector = gc.get_threshold(), Collector()
    collector.settle(0.0)
    assert gc.get_threshold()[2] > 1_000_000
    assert gc.get_freeze_count() > 0
    assert len(collections) == 1
    collector.close()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_an_idle_core_collects_now_and_then_and_a_busy_one_hardly_ever(collections: list[int]) -> None:
    collector = Collector()
    collector.settle(100.0)
    collections.clear()
    for now_s in (101.0, 100.0 + REST_S - 0.1):
        collector.rest(now_s)
    assert collections == []
    collector.rest(100.0 + REST_S)
    collector.rest(101.0 + REST_S)
    assert len(collections) == 1
    collector.stepped(99.0 + REST_S + LATEST_S)
    assert len(collections) == 1
    collector.stepped(100.0 + REST_S + LATEST_S)
    assert len(collections) == 2

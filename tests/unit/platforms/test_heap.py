"""The heap is trimmed once an interval, and the real trim does not fail."""

from __future__ import annotations

from headrace.platforms.heap import HeapTrimmer, find_trim


def test_trims_once_an_interval() -> None:
    calls: list[str] = []
    trimmer = HeapTrimmer(100.0, lambda: calls.append("trim"), interval_s=10.0)
    for now_s, expected in ((100.0, 0), (109.9, 0), (110.0, 1), (110.1, 1), (119.9, 1), (120.5, 2), (500.0, 3)):
        trimmer.tick(now_s)
        assert len(calls) == expected, now_s


def test_the_real_trim_can_be_called_twice() -> None:
    trim = find_trim()
    trim()
    trim()

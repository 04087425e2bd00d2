"""What to do after a crash of the core: which requests are suspect, and whether to try again. Pure policy.

Must not know processes, sockets or clocks: the client tells it what happened and when.

A request that was on the device in two crashes in a row, without having got ahead in between, is a suspect. A lone
suspect is the likely cause and is failed. Several suspects shared the batch with the cause, so they go on one at a
time; if the core crashes once more, the one that was let on is failed, and the others are saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace.base.ids import RequestId

CLEARING_TOKENS = 3
"""A request that delivered this many tokens since the restart has passed a prefill and a decode step unharmed."""


class CrashLedger:
    """Counts crashes in a row for each unfinished request, and lets suspects go on one at a time."""

    def __init__(self) -> None:
        self._strikes: dict[RequestId, int] = {}
        self._fresh_tokens: dict[RequestId, int] = {}
        self._held: deque[RequestId] = deque()
        self._trial: RequestId | None = None

    @property
    def held(self) -> frozenset[RequestId]:
        """Suspects that wait for their trial: not to be submitted yet."""
        return frozenset(self._held)

    def on_crash(self, unfinished: Iterable[RequestId], on_device: set[RequestId] | None) -> list[RequestId]:
        """Judge a crash.

        Args:
            unfinished: all requests that have not ended, oldest first.
            on_device: those the core was working on; None if unknown, which means all that were with the core.

        Returns:
            Requests to fail as the likely cause: none or one. All others are submitted again, except `held`.
        """
        order = list(unfinished)
        with_core = set(order) - set(self._held)
        touched = with_core if on_device is None else on_device & with_core
        suspects = [request_id for request_id in order if request_id in touched and self._strike(request_id) >= 2]
        for request_id in with_core - touched:
            self._strikes.pop(request_id, None)
        self._fresh_tokens.clear()
        guilty = self._trial if self._trial in suspects else None
        if guilty is None and len(suspects) == 1 and not self._held:
            guilty = suspects[0]
        self._trial = None
        if guilty is not None:
            self.forget(guilty)
        self._held.extend(request_id for request_id in suspects if request_id != guilty)
        return [] if guilty is None else [guilty]

    def _strike(self, request_id: RequestId) -> int:
        got_ahead = self._fresh_tokens.get(request_id, 0) >= CLEARING_TOKENS
        self._strikes[request_id] = 1 if got_ahead else self._strikes.get(request_id, 0) + 1
        return self._strikes[request_id]

    def next_trial(self) -> RequestId | None:
        """Return the suspect to submit now, or None if there is none or one is on trial already."""
        if self._trial is not None or not self._held:
            return None
        self._trial = self._held.popleft()
        return self._trial

    def delivered(self, request_id: RequestId, tokens: int) -> bool:
        """Note new tokens of a request. Return True if that ends a trial, so that `next_trial` may be asked."""
        if not self._strikes:
            return False
        fresh = self._fresh_tokens.get(request_id, 0) + tokens
        self._fresh_tokens[request_id] = fresh
        if fresh < CLEARING_TOKENS:
            return False
        self._strikes.pop(request_id, None)
        return self._end_trial(request_id)

    def forget(self, request_id: RequestId) -> bool:
        """A request ended or was aborted. Return True if that ends a trial."""
        self._strikes.pop(request_id, None)
        self._fresh_tokens.pop(request_id, None)
        if request_id in self._held:
            self._held.remove(request_id)
        return self._end_trial(request_id)

    def _end_trial(self, request_id: RequestId) -> bool:
        if self._trial != request_id:
            return False
        self._trial = None
        return True


class RestartBudget:
    """How many crashes within a window are borne.

    Args:
        max_restarts: crashes within the window that are answered by a restart.
        window_s: length of the window in seconds.
    """

    def __init__(self, max_restarts: int, window_s: float = 600.0) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._crashes_s: deque[float] = deque()

    def allows(self, now_s: float) -> bool:
        """Note a crash at ``now_s`` and return whether to restart."""
        self._crashes_s.append(now_s)
        while self._crashes_s and self._crashes_s[0] <= now_s - self._window_s:
            self._crashes_s.popleft()
        return len(self._crashes_s) <= self._max_restarts

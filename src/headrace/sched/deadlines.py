"""When requests must have ended. Must not read a clock or end anything."""

from __future__ import annotations

import heapq
from collections.abc import Container, Sized
from typing import Protocol

from headrace.base.errors import RequestTimeoutError
from headrace.base.ids import RequestId
from headrace.sched.request import Request

_SMALL = 64


class _Live(Sized, Container[RequestId], Protocol):
    """The requests that have not ended."""


class Deadlines:
    """A heap of moments. Ids only: a request that ended long before its deadline must not stay in memory for it."""

    def __init__(self, live: _Live) -> None:
        """Begin with none.

        Args:
            live: the requests that have not ended, by id; seen as they are at each call.
        """
        self._live = live
        self._heap: list[tuple[float, RequestId]] = []

    @property
    def next_s(self) -> float | None:
        """Monotonic seconds of the first deadline, maybe of a request that has ended; None without."""
        return self._heap[0][0] if self._heap else None

    def add(self, request_id: RequestId, deadline_s: float) -> None:
        """Note a deadline; from time to time, forget those of requests that have ended.

        Mutates: the heap.
        """
        if len(self._heap) > _SMALL and len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, request_id))

    def due(self, now_s: float) -> list[RequestId]:
        """Take out the requests whose time is over, in the order of their deadlines.

        Mutates: the heap.
        """
        late: list[RequestId] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            if request_id in self._live:
                late.append(request_id)
        return late


def timeout_error(request: Request) -> RequestTimeoutError:
    """Return the error of a request whose time is over: where it was, and what to do."""
    produced_tokens = len(request.token_ids) - request.prompt_tokens
    most_tokens = request.limit_tokens - request.prompt_tokens
    return RequestTimeoutError(
        f"the request did not end in time: it was {request.state.value} and had {produced_tokens} of at most "
        f"{most_tokens} output tokens; allow more time (the request's timeout, or --request-timeout-s of the server), "
        "ask for fewer tokens, or retry when fewer requests are there"
    )

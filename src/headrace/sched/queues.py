"""The waiting requests in the order in which they may start. Policies differ only in the key.

A preempted request comes back to its old place, because its key has not changed. Must not look at blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from headrace.base.errors import invariant
from headrace.sched.request import Request
from headrace.types.requests import EngineRequest

POLICIES = ("fcfs", "priority")


def order_key(source: EngineRequest, policy: str, ageing_s: float, sequence: int) -> tuple[float, int]:
    """Return the place of a request in the order; smaller goes first.

    A request gains one priority level for every ``ageing_s`` seconds that it is older than another. Both age alike, so
    the difference of two never changes and the key is a constant: ``priority * ageing_s + arrival_s``.

    Args:
        source: the request.
        policy: "fcfs" ignores ``priority``.
        ageing_s: seconds of waiting that are worth one level of priority.
        sequence: number of the request in order of entry, which decides ties.
    """
    lead_s = source.priority * ageing_s if policy == "priority" else 0.0
    return (lead_s + source.arrival_s, sequence)


class WaitingQueue:
    """A sorted list: thousands of requests at most, so moving memory is cheaper than a heap with dead entries."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Put a request at its place."""
        insort(self._requests, request, key=_key)

    def at(self, place: int) -> Request:
        """Return the request at a place; 0 is the one that may start next.

        Requires: ``place < len(self)``.
        """
        return self._requests[place]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands.

        Raises:
            InvariantError: it is not in the queue.
        """
        place = bisect_left(self._requests, request.order_key, key=_key)
        found = place < len(self._requests) and self._requests[place] is request
        invariant(found, f"request {request.request_id} is not in the waiting queue")
        del self._requests[place]

    def requests(self) -> list[Request]:
        """Return all waiting requests in order."""
        return list(self._requests)


def _key(request: Request) -> tuple[float, int]:
    return request.order_key

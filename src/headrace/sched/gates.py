"""Requests that may not start yet, however much room there is: parked beside the queue until an event lets them in.

So the queue holds only what could start, and a pass over it never stumbles over a blocked one. Each kind of waiting has
somebody who must answer: the grammar compiler, the leader's end, the tenant's next release, the store or a time.
Must not look at blocks, budgets or clocks.
"""

from __future__ import annotations

import math
from collections import Counter

from headrace.base.ids import RequestId
from headrace.sched.queues import WaitingQueue
from headrace.sched.request import Request, RequestState


class Gates:
    """The parked requests, and who lets them go."""

    def __init__(self, queue: WaitingQueue) -> None:
        """Begin with nobody.

        Args:
            queue: where requests come from and go back to.
        """
        self._queue = queue
        self._parked: dict[RequestId, Request] = {}
        self._leaders: dict[RequestId, tuple[Request, list[Request]]] = {}
        self._tenants: dict[str, list[Request]] = {}
        self._lookups: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def parked(self) -> list[Request]:
        """Parked requests in no particular order; to look at, not to change."""
        return list(self._parked.values())

    def counts(self) -> Counter[RequestState]:
        """Return how many are parked for each reason."""
        return Counter(request.state for request in self._parked.values())

    def enter(self, request: Request, leader: Request | None) -> None:
        """Put a new request where it belongs: parked for its grammar, behind its leader, or into the queue.

        Args:
            request: a new one, or one whose grammar has just come.
            leader: whom it waits for, or None.

        Mutates: the gates, the queue.
        """
        if request.gated and request.state is RequestState.WAITING:
            request.move_to(RequestState.GRAMMAR)
            self._parked[request.request_id] = request
            return
        self._parked.pop(request.request_id, None)
        if leader is None:
            if request.state is not RequestState.WAITING:
                request.move_to(RequestState.WAITING)
            self._queue.push(request)
            return
        request.move_to(RequestState.LEADER)
        self._parked[request.request_id] = request
        self._leaders.setdefault(leader.request_id, (leader, []))[1].append(request)

    def park_for_quota(self, request: Request, tenant: str) -> None:
        """Take a request out of the queue until its tenant gives memory back.

        Mutates: the gates, the queue.
        """
        self._park(request, RequestState.QUOTA)
        self._tenants.setdefault(tenant, []).append(request)

    def park_for_store(self, request: Request, until_s: float) -> None:
        """Take a request out of the queue until the store answers, a load of another one ends, or a time comes.

        Mutates: the gates, the queue.
        """
        self._park(request, RequestState.LOOKUP)
        self._lookups[request.request_id] = until_s

    def tenant_released(self, tenant: str | None) -> None:
        """A request of a tenant has given its memory back: those parked for it may be looked at again.

        Mutates: the gates, the queue.
        """
        if self._tenants and tenant is not None:
            for request in self._tenants.pop(tenant, ()):
                self._let_in(request)

    def leader_ended(self, leader_id: RequestId) -> None:
        """Let the followers of a request in: it has ended, whatever the way.

        Mutates: the gates, the queue.
        """
        if self._leaders:
            _, followers = self._leaders.pop(leader_id, (None, ()))
            for request in followers:
                self._let_in(request)

    def check_leaders(self) -> None:
        """Let those in whose leader has its prompt computed, and applied, by now. Call it after each result.

        Mutates: the gates, the queue.
        """
        if self._leaders:
            for leader, _ in list(self._leaders.values()):
                if leader.computed_tokens >= leader.prompt_tokens:
                    self.leader_ended(leader.request_id)

    def store_answered(self, request_id: RequestId) -> None:
        """The look-up of a request has an answer. Those not parked for one are ignored.

        Mutates: the gates, the queue.
        """
        if request_id in self._lookups:
            del self._lookups[request_id]
            self._let_in(self._parked[request_id])

    def load_ended(self) -> None:
        """Some load has ended, so another may begin: let those in that wait for nothing else.

        Mutates: the gates, the queue.
        """
        for request_id in [name for name, until_s in self._lookups.items() if until_s == math.inf]:
            self.store_answered(request_id)

    def lookups_late(self, now_s: float) -> list[RequestId]:
        """Let those in whose look-up took too long, and return them: they start without.

        Mutates: the gates, the queue.
        """
        late = [name for name, until_s in self._lookups.items() if until_s <= now_s]
        for request_id in late:
            self.store_answered(request_id)
        return late

    def drop(self, request: Request) -> None:
        """Forget a parked request that ends.

        Mutates: the gates.
        """
        del self._parked[request.request_id]
        self._lookups.pop(request.request_id, None)
        for waiting in (*self._tenants.values(), *(followers for _, followers in self._leaders.values())):
            if request in waiting:
                waiting.remove(request)

    def _park(self, request: Request, state: RequestState) -> None:
        self._queue.remove(request)
        request.move_to(state)
        self._parked[request.request_id] = request

    def _let_in(self, request: Request) -> None:
        del self._parked[request.request_id]
        request.move_to(RequestState.WAITING)
        self._queue.push(request)


def follows(request: Request, leader: Request | None, hash_tokens: int) -> bool:
    """Return whether it is worth waiting for a leader: it has not computed its prompt, and this one could hit it.

    Args:
        request: a new one, or one whose grammar has come.
        leader: the request that it names, if that has not ended.
        hash_tokens: tokens under one prefix hash; a shorter prompt has nothing to share.
    """
    return (
        leader is not None
        and leader.computed_tokens < leader.prompt_tokens
        and request.kv.cacheable
        and leader.kv.cacheable
        and not request.wants_prompt_logprobs
        and request.prompt_tokens > hash_tokens
    )

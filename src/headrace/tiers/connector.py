"""The scheduler's side of a store that keeps KV outside of the device: what it is asked and told.

A connector answers and takes notes; it never acts on its own: loads are jobs of a plan, and their ends come back as
events. Must not know block pools, steps or who runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.base.ids import RequestId
from headrace.types.plans import LoadJob


@dataclass(frozen=True)
class ConnectorCapabilities:
    """What a connector can do beyond the contract. Everything defaults to **no**.

    Attributes:
        divergent_hits: if it reports tokens beyond a boundary at which only the recurrent state is missing here, its
            load brings that state at the end of the load. Without it, it is asked only at boundaries where every group
            has what it needs.
    """

    divergent_hits: bool = False


class KvConnector(Protocol):
    """An outside store, as the scheduler sees it.

    For one request, in order: `lookup` (any number of times), `load_planned` if a load was planned, and at the end
    `request_finished` once, if there was any lookup.
    """

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """What it can do **now**: read at every use, never kept, because it may depend on the state of the store."""
        ...

    def lookup(
        self, request_id: RequestId, hashes: Sequence[bytes], local_tokens: int, limit_tokens: int
    ) -> int | None:
        """Say how many tokens beyond the local ones the store has. No side effects: it may be asked again.

        Args:
            request_id: who asks.
            hashes: prefix hashes from position 0, one a hash unit; more than the limit covers, maybe.
            local_tokens: tokens that the device has; a multiple of the hash unit.
            limit_tokens: the load must not reach beyond this position; a multiple of the hash unit.

        Returns:
            Tokens from ``local_tokens`` on that a load can bring, for **every** group that keeps tokens, with the
            recurrent state at their end; a multiple of the hash unit, at most ``limit_tokens - local_tokens``. 0 if
            there are none. None for "ask later": a `LookupDone` event follows.
        """
        ...

    def load_planned(self, job: LoadJob) -> None:
        """Take note that a load is part of the plan being made. A `JobDone` event must follow, whatever happens."""
        ...

    def request_finished(self, request_id: RequestId) -> None:
        """Take note that a request that was looked up has ended. Its open job, if any, still reports."""
        ...

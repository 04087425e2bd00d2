"""Ending a running request from outside: the client left, its time is over, the server stops.

All three cancel the request's task with a reason; whoever runs the request sees that reason as a typed error, and the
engine sees its iterator closed, which aborts the request in the core. Must not produce output.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from headrace.base.errors import HeadraceError
from headrace.serve.context import ServeState
from headrace.serve.time_limit import TimeLimit


class ClientGoneError(HeadraceError):
    """The client closed the connection; nobody is left to answer."""

    http_status = 499
    code = "client_disconnected"


class Interruptible:
    """Context in which the current task can be interrupted; leaving it re-raises the reason.

    Args:
        state: of the server.
        receive: of the connection.
        limit: how long the request may live from now on.

    Requires: the request body was read completely, so that the next message of ``receive`` is the disconnect.
    """

    def __init__(self, state: ServeState, receive: Receive, limit: TimeLimit) -> None:
        self._state = state
        self._limit = limit
        self._receive = receive
        self._reason: HeadraceError | None = None
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def interrupt(self, error: HeadraceError) -> None:
        """End the request with ``error``. Only the first call counts; a request that has ended ignores it."""
        if self._reason is None and self._task is not None:
            self._reason = error
            self._task.cancel()

    async def __aenter__(self) -> Interruptible:
        """Start to watch the client and the clock."""
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch_client())
        if self._limit.seconds > 0.0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit.seconds, self.interrupt, self._limit.error())
        self._state.in_flight.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; turn our own cancellation into its reason.

        Raises:
            HeadraceError: the reason of the interruption.
        """
        task, self._task = self._task, None
        self._state.in_flight.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is not None and task is not None:
            task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._reason from None

    async def _watch_client(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.interrupt(ClientGoneError("the client closed the connection"))
                return

"""The front end's end of a request: a queue of deltas that is also an async iterator. Must not know sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from headrace.base.errors import HeadraceError
from headrace.base.ids import RequestId
from headrace.types.outputs import RequestDelta


class DeltaStream:
    """Deltas of one or several requests in the order of their arrival; ends when all of them have ended.

    Args:
        request_ids: the requests whose deltas arrive here.
        abort: called with the ids that have not ended when the stream is closed.
    """

    def __init__(self, request_ids: Sequence[RequestId], abort: Callable[[Sequence[RequestId]], None]) -> None:
        self._open = dict.fromkeys(request_ids)
        self._abort = abort
        self._deltas: deque[RequestDelta] = deque()
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: RequestDelta) -> None:
        """Add a delta (called by the client's receive loop). After `fail` nothing more is taken."""
        if self._error is not None:
            return
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._open.pop(delta.request_id, None)
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """End the stream with an error, after the deltas that are already there. The first error stays.

        Requests of the stream that still run are aborted when the error is raised, or by `close`: nobody reads them.
        """
        if self._error is None and self._open:
            self._error = error
        self._wake()

    def drop(self, request_id: RequestId) -> None:
        """A request ended on this side (stop string, abort): nothing more comes for it."""
        self._open.pop(request_id, None)
        self._wake()

    def close(self) -> None:
        """Abort what has not ended and end the iteration. Safe to call twice."""
        unfinished = list(self._open)
        self._open.clear()
        self._deltas.clear()
        self._error = None
        self._wake()
        if unfinished:
            self._abort(unfinished)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> RequestDelta:
        while True:
            if self._deltas:
                return self._deltas.popleft()
            if self._error is not None:
                error = self._error
                self.close()
                raise error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def aclose(self) -> None:
        """Same as `close`, for ``contextlib.aclosing``."""
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

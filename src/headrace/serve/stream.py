"""Server-sent events, and joining several engine streams into one.

An event is bytes that somebody prepared; no model object is built for a token. Must not know the shape of an event,
except for errors and the end mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.serve.context import ServeState
from headrace.serve.errors import envelope, error_response, internal_error
from headrace.serve.interrupt import ClientGoneError, Interruptible
from headrace.serve.time_limit import TimeLimit

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_QUEUE_CHUNKS = 64


class EventStream(Response):
    """Sends prepared events. The status line waits for the first event, so that an early refusal has its own status."""

    def __init__(self, state: ServeState, events: AsyncGenerator[bytes, None], limit: TimeLimit) -> None:
        super().__init__(media_type="text/event-stream")
        self._state = state
        self._events = events
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. An error after the first event is an event itself, followed by the end mark."""
        started = False
        body: Message = {"type": "http.response.body", "body": b"", "more_body": True}
        try:
            async with Interruptible(self._state, receive, self._limit), aclosing(self._events) as events:
                async for event in events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                        started = True
                    body["body"] = event
                    await send(body)
            last = DONE
        except ClientGoneError:
            return
        except Exception as fault:
            error = fault if isinstance(fault, HeadraceError) else internal_error(fault)
            if not started:
                await error_response(error)(scope, receive, send)
                return
            last = b"data: " + msgspec.json.encode(envelope(error)) + b"\n\n" + DONE
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (stream number, item) of all streams as items come. Closing it closes all streams at once.

    The first error of any stream ends the whole.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_QUEUE_CHUNKS)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await queue.put((number, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            entry = await queue.get()
            if entry is None:
                open_streams -= 1
            elif isinstance(entry, BaseException):
                raise entry
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

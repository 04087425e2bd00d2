"""``X-Request-Id``: the client's, or a new one, comes back with every answer. Must not read bodies."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_MAX_CHARS = 256


class RequestIdMiddleware:
    """ASGI middleware that gives every request an id and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its id in the scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        usable = 0 < len(given) <= _MAX_CHARS and all(33 <= byte <= 126 for byte in given)
        if usable:
            scope["headrace_client_request_id"] = given.decode("ascii")
        identity = given if usable else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                message["headers"] = [*message["headers"], (_HEADER, identity)]
            await send(message)

        await self._app(scope, receive, send_with_id)

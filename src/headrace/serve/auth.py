"""API keys: with at least one key set, every path but the listed open ones is denied without it.

Deny by default: an endpoint that is added later is protected without doing anything. Must not know endpoints.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import AuthenticationError
from headrace.serve.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeyMiddleware:
    """ASGI middleware that checks ``Authorization: Bearer KEY`` before anything is read."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        # Digests have one length, so that the comparison takes the same time for every wrong key.
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            answer = error_response(
                AuthenticationError("missing or wrong API key; send the header 'Authorization: Bearer KEY'")
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    return False
                given = _digest(key.strip())
                # No short cut: all keys are compared.
                return any([hmac.compare_digest(given, known) for known in self._digests])
        return False

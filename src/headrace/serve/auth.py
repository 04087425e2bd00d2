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
from headrace.serve.tenants import Caller, caller_of_key, remember_caller

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeyMiddleware:
    """ASGI middleware that checks ``Authorization: Bearer KEY`` before anything is read, and notes whose key it is."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        # Digests have one length, so that the comparison takes the same time for every wrong key.
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._callers = [caller_of_key(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            caller = self._caller(scope)
            if caller is None:
                answer = error_response(
                    AuthenticationError("missing or wrong API key; send the header 'Authorization: Bearer KEY'")
                )
                await answer(scope, receive, send)
                return
            remember_caller(scope, caller)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    return None
                given = _digest(key.strip())
                # No short cut: all keys are compared.
                matches = [hmac.compare_digest(given, known) for known in self._digests]
                return self._callers[matches.index(True)] if any(matches) else None
        return None

"""Reading a request body: size limit, strict JSON, validation against a schema.

The body is read here and nowhere else, so that a limit cannot be forgotten. Must not know any endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from headrace.base.errors import PayloadTooLargeError, RequestError, UnsupportedMediaTypeError
from headrace.serve.context import ServeState
from headrace.serve.errors import envelope, from_validation
from headrace.serve.openai.schema_common import RequestModel

T = TypeVar("T", bound=RequestModel)

_DRAIN_BYTES = 64 << 20
_DRAIN_S = 5.0


class BodyTooLarge(PayloadTooLargeError):
    """Raised while reading; answered by `answer_too_large`, which lets the client finish sending."""


def body_of(schema: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Return a FastAPI dependency that reads, parses and validates a JSON body."""

    async def dependency(request: Request) -> T:
        state: ServeState = request.app.state.serve
        _check_media_type(request)
        data = parse_json(await read_body(request, state.config.max_body_bytes))
        try:
            return schema.model_validate(data, context={"unknown_fields": state.config.unknown_fields})
        except ValidationError as error:
            raise from_validation(error) from None

    return dependency


def _check_media_type(request: Request) -> None:
    """Accept JSON only: a browser can send other types across origins without asking first.

    Raises:
        UnsupportedMediaTypeError: another type, none, or a compressed body.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMediaTypeError(f"Content-Encoding {encoding[:100]} is not supported; send the JSON as it is")
    declared = request.headers.get("content-type", "")
    media_type = declared.split(";", 1)[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaTypeError(
            f"Content-Type must be application/json, got {declared[:100] or 'none'}; "
            "with curl add: -H 'Content-Type: application/json'"
        )


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read the body, never more than the limit.

    Raises:
        BodyTooLarge: declared or actual size above the limit.
        ClientDisconnect: the client left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(_too_large(f"{int(declared):,} bytes", limit_bytes))
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise BodyTooLarge(_too_large(f"more than {limit_bytes:,} bytes", limit_bytes))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(size: str, limit_bytes: int) -> str:
    return f"the body has {size}, the limit is {limit_bytes:,}; shorten it or start the server with --max-body-bytes"


def parse_json(body: bytes) -> Any:
    """Parse strict JSON: no NaN or infinity, no lone surrogates, bounded nesting.

    Raises:
        RequestError: saying where it breaks.
    """
    if not body:
        raise RequestError("the body is empty; a JSON object is expected")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the JSON body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


async def answer_too_large(error: BodyTooLarge, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the 413 at once, then read and drop what the client is still sending.

    Closing a socket that has unread data resets the connection, and the client would see the reset in place of the
    answer. Reading on is bounded in bytes and seconds.
    """
    body = msgspec.json.encode(envelope(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-should-retry", b"false"),
    ]
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    dropped_bytes = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while dropped_bytes < _DRAIN_BYTES:
                message = await receive()
                dropped_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})

"""A small HTTP/1.1 client for streams of server-sent events: a time stamp for every event, and little CPU.

Events are taken apart in the socket's callback, so a token costs no task switch. Used by ``bench serve``,
``bench startup`` and ``chat --url``. Must not know what the events mean.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from headrace.base.errors import ConfigError, EngineUnavailableError, HeadraceError

EventSink = Callable[[bytes, float], None]
"""Takes the data of one event and the second (`time.perf_counter`) at which it arrived."""


class ServerAnswerError(HeadraceError):
    """A server answered with an error; the message has its status and its words."""

    code = "server_answer"


@dataclass(frozen=True)
class Endpoint:
    """A server to talk to.

    Attributes:
        host: name or address.
        port: number.
        tls: True for https.
        prefix: path before ``/v1``.
        api_key: sent as bearer token, or None.
    """

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None

    @property
    def url(self) -> str:
        """The address without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_endpoint(url: str, api_key: str | None = None) -> Endpoint:
    """Read a server's URL; a missing scheme means http, a trailing ``/v1`` is dropped.

    Raises:
        ConfigError: not such a URL.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url!r}: {error}", param="url") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--url {url!r} is not the URL of a server; write it like http://127.0.0.1:8000", param="url")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)


@dataclass
class HttpAnswer:
    """Status and body of an answer; ``body`` is empty if the events went to a sink."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    def json(self) -> Any:
        """Return the body as plain data; None if it is not JSON."""
        try:
            return msgspec.json.decode(bytes(self.body))
        except msgspec.MsgspecError:
            return None

    def require_ok(self, endpoint: Endpoint, path: str) -> None:
        """Check for a 2xx status.

        Raises:
            ServerAnswerError: with the server's own message.
        """
        if not 200 <= self.status < 300:
            raise ServerAnswerError(f"{endpoint.url}{path} answered {self.status}: {error_text(bytes(self.body))}")


def error_text(body: bytes) -> str:
    """Return the message of an OpenAI error envelope, or the beginning of whatever the body is."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:300].decode(errors="replace").strip() or "no text"
    if isinstance(document, dict):
        error = document.get("error", document)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or error)
        return str(error)
    return str(document)


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[HttpAnswer] | None = None
        self._sink: EventSink | None = None
        self._answer = HttpAnswer()
        self._parser: Any = None
        self._is_stream = False
        self._pending = b""
        self._now_s = 0.0
        self.reusable = False

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]
        self.reusable = True

    def data_received(self, data: bytes) -> None:
        """Feed the parser; everything in one packet gets one time stamp."""
        self._now_s = time.perf_counter()
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(EngineUnavailableError(f"the server does not speak HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the exchange that is open."""
        self.reusable = False
        cause = f" ({exc})" if exc else ""
        self._fail(EngineUnavailableError(f"the server closed the connection in the middle of an answer{cause}"))

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the type of the body."""
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """Collect the body, or split it into events."""
        if self._sink is None or not self._is_stream or self._parser.get_status_code() != 200:
            self._answer.body += body
            return
        self._pending += body
        while (end := self._pending.find(b"\n")) >= 0:
            line, self._pending = self._pending[:end].rstrip(b"\r"), self._pending[end + 1 :]
            if line.startswith(b"data:"):
                self._sink(line[5:].lstrip(), self._now_s)

    def on_message_complete(self) -> None:
        """Finish the exchange."""
        self._answer.status = self._parser.get_status_code()
        if self._answer.status < 200:
            return
        self.reusable = self._parser.should_keep_alive()
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(self._answer)

    def _fail(self, error: HeadraceError) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(error)

    async def exchange(self, head: bytes, body: bytes, sink: EventSink | None) -> HttpAnswer:
        """Send one request and wait for the end of its answer.

        Args:
            head: request line and headers, complete.
            body: after the headers.
            sink: takes the events if the answer is a stream.

        Raises:
            EngineUnavailableError: the connection broke.
        """
        if self._transport is None:
            raise EngineUnavailableError("the connection is not open")
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._sink, self._is_stream, self._pending = HttpAnswer(), sink, False, b""
        self._done = asyncio.get_running_loop().create_future()
        done = self._done
        self._transport.write(head + body)
        try:
            return await done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self.reusable = False
        if self._transport is not None:
            self._transport.close()


class Client:
    """Keeps idle connections to one server and opens new ones when all are busy."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []

    async def request(self, method: str, path: str, document: Any = None, sink: EventSink | None = None) -> HttpAnswer:
        """Send one request.

        Args:
            method: GET or POST.
            path: after the server's URL.
            document: sent as JSON if not None.
            sink: takes the events if the answer is a stream.

        Raises:
            EngineUnavailableError: the server cannot be reached or broke off.
        """
        body = b"" if document is None else msgspec.json.encode(document)
        head = self._head(method, path, len(body))
        connection = await self._take()
        answer = await connection.exchange(head, body, sink)
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.endpoint.prefix}{path} HTTP/1.1", f"Host: {self.endpoint.host}:{self.endpoint.port}"]
        lines += ["Accept: */*", "User-Agent: headrace"]
        if self.endpoint.api_key:
            lines.append(f"Authorization: Bearer {self.endpoint.api_key}")
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        end = self.endpoint
        context = ssl.create_default_context() if end.tls else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(Connection, end.host, end.port, ssl=context)
        except (OSError, TimeoutError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else str(error)
            text = f"cannot reach {end.url} ({reason}); is the server running there? Start one with: headrace serve"
            raise EngineUnavailableError(text) from error
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

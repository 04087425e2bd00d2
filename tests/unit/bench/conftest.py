"""A small server with OpenAI's streaming API, for the load generator to talk to."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import pytest


@dataclass
class FakeServer:
    """Answers completions and chats with ``max_tokens`` pieces; what it saw and how it should misbehave."""

    url: str = ""
    requests: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    connections: int = 0
    running: int = 0
    running_max: int = 0
    status: int = 200
    usage: bool = True
    break_off_after: int | None = None
    stream_error: bool = False
    gate: asyncio.Event | None = None
    open_gate_at: int | None = None

    async def handle(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-l")), 0)
                body = json.loads(await reader.readexactly(length)) if length else None
                self.headers.append(head)
                await self.answer(head.split()[1], body, writer)
        writer.close()

    async def answer(self, path, body, writer):
        if path.endswith("/v1/models"):
            self.plain(writer, 200, {"data": [{"id": "fake-model"}]})
        elif self.status != 200:
            self.plain(writer, self.status, {"error": {"message": "no, because of a reason"}})
        else:
            self.requests.append(body)
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            try:
                if self.gate is not None and self.running == self.open_gate_at:
                    self.gate.set()
                if self.gate is not None:
                    await self.gate.wait()
                await self.stream("chat" in path, body, writer)
            finally:
                self.running -= 1

    def plain(self, writer, status, document):
        data = json.dumps(document).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    async def stream(self, chat, body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(body["max_tokens"]):
            if number == self.break_off_after:
                writer.close()
                return
            piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
            self.event(writer, {"choices": [piece]})
            await writer.drain()
        if self.stream_error:
            self.event(writer, {"error": {"message": "the engine stumbled"}})
        if self.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            self.event(writer, {"choices": [], "usage": usage})
        self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def event(self, writer, document):
        data = b"data: " + json.dumps(document).encode() + b"\n\n"
        self.chunk(writer, data[:9])  # an event in two chunks, so that the splitting is exercised
        self.chunk(writer, data[9:])

    def chunk(self, writer, data):
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
async def fake_server():
    fake = FakeServer()
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield fake
    server.close()

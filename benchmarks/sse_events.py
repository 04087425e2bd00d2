"""How many server-sent events a second the HTTP surface writes: a real socket, an engine that costs nothing.

Prints one JSON line for each endpoint. Usage: python benchmarks/sse_events.py [EVENTS [STREAMS]]
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import uvloop

from headrace.config import ServerConfig
from headrace.engine.request_output import OutputChunk
from headrace.engine.text_engine import Health
from headrace.serve.app import create_app
from headrace.serve.http_server import HttpServer
from headrace.serve.listen import bind
from headrace.types.outputs import SchedulerStats

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "stream": True},
    "/v1/completions": {"prompt": [1, 2], "stream": True},
}


class FreeEngine:
    """Yields the same token again and again; lets the event loop breathe as a step of eight requests would."""

    model_name, max_model_len, defaults = "free", 4096, {}

    tokenizer = None  # "Try it" then shows token ids

    def __init__(self, events: int) -> None:
        self._events = events
        self.startup_tables: list[Any] = []
        self.chat_template = self

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    def health(self) -> Health:
        """Always ready."""
        return Health("ready", "", 0, 0, 0.0)

    def stats(self) -> SchedulerStats:
        """No scheduler."""
        return SchedulerStats()

    def render(self, messages: list[Any], **_: Any) -> str:
        """Stand in for the chat template."""
        return "prompt"

    async def stream(self, prompt: Any, sampling: Any, **_: Any) -> AsyncIterator[OutputChunk]:
        """Yield chunks of one token."""
        for number in range(self._events):
            if number % 8 == 0:
                await asyncio.sleep(0)
            last = number == self._events - 1
            first_ids = [1, 2] if number == 0 else []
            yield OutputChunk(0, " token", [7], prompt_token_ids=first_ids, finish_reason="length" if last else None)


def read_stream(url: str, path: str) -> int:
    """Read one stream to its end without decoding it; return the number of events."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(BODIES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        events, tail = 0, b""
        while b"[DONE]" not in tail:
            data = connection.recv(1 << 20)
            events += (tail[-5:] + data).count(b"data: ")
            tail = data[-40:]
    return events


async def measure(events: int, streams: int) -> None:
    """Serve, let other processes read, and print what it cost this process."""
    engine: Any = FreeEngine(events)
    config = ServerConfig(port=0, shutdown_timeout_s=0.0)
    with bind(config) as listener:
        app = create_app(engine, config)
        server = HttpServer(app, engine, config, listener)
        with redirect_stdout(StringIO()):
            running = asyncio.create_task(server.run())
            await asyncio.sleep(0.2)
        for path in BODIES:
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            readers = [
                await asyncio.create_subprocess_exec(
                    sys.executable, __file__, "--read", listener.url, path, stdout=subprocess.PIPE
                )
                for _ in range(streams)
            ]
            counts = [int((await reader.communicate())[0]) for reader in readers]
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            rate = round(sum(counts) / cpu_s)
            print(
                json.dumps({"path": path, "streams": streams, "events": sum(counts), "events_per_cpu_s": rate}),
                flush=True,
            )
        server.stop()
        await running


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        print(read_stream(*sys.argv[2:]))
    else:
        numbers = [int(word) for word in sys.argv[1:]] + [40_000, 1][len(sys.argv) - 1 :]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(*numbers))

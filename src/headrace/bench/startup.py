"""``bench startup``: start ``headrace serve`` in a process of its own and wait for readiness and the first chat answer.

Cold means: the model's files are out of the page cache, and the cache directory is empty. Must not run the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import EngineUnavailableError
from headrace.bench.http_client import Client, parse_endpoint
from headrace.bench.report import StartRun, StartupReport, environment, say, summarize
from headrace.bench.serve import first_model
from headrace.config.option import option

_URL = re.compile(rb"https?://[^\s\"'<>]+:\d+")
_POLL_S = 0.02
HEADRACE = (sys.executable, "-m", "headrace")


@dataclass(frozen=True)
class StartupOptions:
    """Starts of the server."""

    cold_starts: int = option(1, "Starts with the model out of the page cache and an empty cache directory.", low=0)
    warm_starts: int = option(3, "Starts after one another, with everything warm.", low=0)
    timeout_s: float = option(300.0, "Longest wait for one start in seconds.", low=0.001)


def evict(paths: Sequence[Path]) -> int:
    """Drop files from the page cache, as far as the system allows.

    Args:
        paths: files.

    Returns:
        How many were dropped.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return len(paths)


class ServerProcess:
    """One ``headrace serve`` on a free port."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._seen = b""
        self._reader: asyncio.Task[None] | None = None
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the process."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environ,
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        while line := await self._process.stdout.readline():
            self._seen = (self._seen + line)[-4000:]
            found = _URL.search(line)
            if found and not self._url.done():
                self._url.set_result(found.group().decode())
        if not self._url.done():
            self._url.set_exception(EngineUnavailableError(f"the server ended before it was ready: {self.last_line()}"))

    def last_line(self) -> str:
        """Return the last line that the server printed."""
        lines = self._seen.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    async def url(self) -> str:
        """Return the server's address as soon as it prints it.

        Raises:
            EngineUnavailableError: it ended before.
        """
        return await asyncio.shield(self._url)

    async def wait_ready(self, client: Client) -> None:
        """Wait until ``/health`` answers 200.

        Raises:
            EngineUnavailableError: the process ended before.
        """
        while True:
            with contextlib.suppress(EngineUnavailableError):
                if (await client.request("GET", "/health")).status == 200:
                    return
            if self._process is None or self._process.returncode is not None:
                raise EngineUnavailableError(f"the server ended before it was ready: {self.last_line()}")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Tell the process to stop; kill it after 15 s."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 15.0)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader
        if self._url.done() and not self._url.cancelled():
            self._url.exception()  # seen by whoever waited for it


async def one_start(kind: str, command: Sequence[str], environ: dict[str, str], timeout_s: float) -> StartRun:
    """Start a server, wait for its first chat answer, stop it.

    Args:
        kind: "cold" or "warm".
        command: starts the server, which prints its URL.
        environ: its environment.
        timeout_s: longest wait for the answer.

    Raises:
        EngineUnavailableError: it did not come up in time.
        ServerAnswerError: it refused the chat request.
    """
    server = ServerProcess(command, environ)
    start_s = time.perf_counter()
    await server.start()
    try:
        async with asyncio.timeout(timeout_s):
            client = Client(parse_endpoint(await server.url()))
            await server.wait_ready(client)
            ready_s = time.perf_counter() - start_s
            name = await first_model(client)
            body = {"model": name, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
            answer = await client.request("POST", "/v1/chat/completions", body)
            answer.require_ok(client.endpoint, "/v1/chat/completions")
            first_answer_s = time.perf_counter() - start_s
            client.close()
    except TimeoutError:
        text = f"no chat answer within --timeout-s {timeout_s:g}; last line of the server: {server.last_line()}"
        raise EngineUnavailableError(text) from None
    finally:
        await server.stop()
    say(f"{kind} start: ready after {ready_s:.2f} s, first chat answer after {first_answer_s:.2f} s")
    return StartRun(kind=kind, ready_s=ready_s, first_answer_s=first_answer_s)


async def measure(
    model: str,
    model_files: Sequence[Path],
    arguments: Sequence[str],
    options: StartupOptions,
    program: Sequence[str] = HEADRACE,
) -> StartupReport:
    """Run all starts, cold ones first; raises as `one_start`.

    Args:
        model: MODEL argument.
        model_files: files to drop from the page cache before a cold start.
        arguments: further flags for ``headrace serve``.
        options: how many starts.
        program: words that run ``headrace``.
    """
    command = [*program, "serve", model, "--port", "0", *arguments]
    runs = []
    for _ in range(options.cold_starts):
        evict(model_files)
        with tempfile.TemporaryDirectory(prefix="headrace-cold-") as cache:
            environ = {**os.environ, "HEADRACE_CACHE_DIR": cache}
            runs.append(await one_start("cold", command, environ, options.timeout_s))
    for _ in range(options.warm_starts):
        runs.append(await one_start("warm", command, dict(os.environ), options.timeout_s))

    def median(kind: str, attribute: str) -> float | None:
        values = [getattr(run, attribute) for run in runs if run.kind == kind]
        return summarize(values).median if values else None

    return StartupReport(
        model=model,
        cold_ready_s=median("cold", "ready_s"),
        cold_first_answer_s=median("cold", "first_answer_s"),
        warm_ready_s=median("warm", "ready_s"),
        warm_first_answer_s=median("warm", "first_answer_s"),
        runs=runs,
        environment=environment(),
    )


def run(model: str, model_files: Sequence[Path], arguments: Sequence[str], options: StartupOptions) -> StartupReport:
    """Run all starts and return the report; arguments and errors as `measure`."""
    return asyncio.run(measure(model, model_files, arguments, options))

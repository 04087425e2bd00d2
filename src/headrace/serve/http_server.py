"""One HTTP server around one engine: listen, load the model meanwhile, serve until told to stop, drain, end.

It listens before the model is loaded, so that ``/health`` can say ``starting``; the line "ready" comes when requests
are served. Must not know any endpoint, and must not make the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from headrace.base.errors import ConfigError, EngineUnavailableError
from headrace.base.log import get_logger
from headrace.config import ServerConfig
from headrace.observe.startup import print_startup
from headrace.serve.listen import Listener

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextEngine

_log = get_logger(__name__)
_HEALTH_POLL_S = 1.0
_BACKSTOP_S = 5.0
_KEEP_ALIVE_S = 75
"""Longer than the pools of clients and proxies keep a connection, so that it is never closed under a new request."""
EXIT_OK = 0
EXIT_FAILED = 1


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handling: it would raise the signal again after an orderly stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One server from listening to the end.

    Args:
        app: from `create_app`.
        engine: not started yet.
        config: the server's options.
        listener: the bound socket.
    """

    def __init__(self, app: FastAPI, engine: TextEngine, config: ServerConfig, listener: Listener) -> None:
        self._engine = engine
        self._config = config
        self._listener = listener
        self._state = app.state.serve
        self._stop = asyncio.Event()
        self._http = _Uvicorn(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(config.shutdown_timeout_s + _BACKSTOP_S),
            )
        )

    def stop(self) -> None:
        """Stop in good order: no new connections, running requests get ``shutdown_timeout_s``, then are ended.

        A second call ends them at once.
        """
        if self._stop.is_set():
            self._end_requests()
            self._http.force_exit = True
        self._stop.set()

    async def run(self) -> int:
        """Serve until stopped. Returns the exit status.

        Raises:
            HeadraceError: the engine could not start.
        """
        self._install_signals()
        self._say(f"Headrace listens on {self._listener.name} (loading; /health answers 200 when ready)")
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener.socket]))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            if not await self._start_engine(stopping):
                return EXIT_OK
            self._announce()
            return await self._watch(stopping, serving)
        finally:
            stopping.cancel()
            await self._shut_down(serving)

    async def _start_engine(self, stopping: asyncio.Task[bool]) -> bool:
        """Start the engine; return False if the server was told to stop meanwhile."""
        starting = asyncio.create_task(self._engine.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        starting.result()
        return True

    async def _watch(self, stopping: asyncio.Task[bool], serving: asyncio.Task[None]) -> int:
        """Wait for the end: told to stop, or the engine gave up."""
        while True:
            done, _ = await asyncio.wait(
                {stopping, serving}, timeout=_HEALTH_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if stopping in done:
                return EXIT_OK
            if serving in done:
                serving.result()
                return EXIT_FAILED
            health = self._engine.health()
            if health.state == "failed":
                _log.error("the engine has failed for good: %s", health.reason)
                return EXIT_FAILED

    async def _shut_down(self, serving: asyncio.Task[None]) -> None:
        self._state.stop_accepting()
        timer = asyncio.get_running_loop().call_later(self._config.shutdown_timeout_s, self._end_requests)
        running = len(self._state.in_flight)
        if running:
            _log.info("stopping; requests that still run: %d; they get %g s", running, self._config.shutdown_timeout_s)
        self._http.should_exit = True
        try:
            await serving
        finally:
            timer.cancel()
            self._state.guest_threads.shutdown(wait=False, cancel_futures=True)
            await self._engine.stop()

    def _end_requests(self) -> None:
        ended = self._state.interrupt_all(EngineUnavailableError("the server is shutting down"))
        if ended:
            _log.warning("requests ended by the shutdown: %d", ended)

    def _install_signals(self) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            # Only the main thread can; elsewhere (tests) `stop` is called directly.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)

    def _announce(self) -> None:
        """Print the start-up table, the URL and one line to try."""
        print_startup(self._engine.startup_tables, sys.stderr)
        self._say(f"Headrace is ready: {self._listener.name}  model {self._engine.model_name}")
        takes_text = self._takes_text()
        chat = takes_text and self._engine.chat_template is not None
        self._say("Try it:\n  " + self._listener.curl(chat, bool(self._config.api_key), takes_text))

    def _takes_text(self) -> bool:
        try:
            return self._engine.tokenizer is not None
        except ConfigError:
            return False

    @staticmethod
    def _say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

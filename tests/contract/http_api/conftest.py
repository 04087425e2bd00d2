"""One live server for all tests of this folder: uvicorn on a socket that the system chose, around a scripted engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from http_fake_engine import FakeTextEngine

from headrace.config import ServerConfig
from headrace.serve.app import create_app
from headrace.serve.http_server import HttpServer
from headrace.serve.listen import bind


class LiveServer:
    """A server in a thread.

    Attributes:
        url: base URL.
        engine: the scripted engine.
        exit_status: what ``run`` returned, once it has ended.
        failure: what ``run`` raised.
    """

    def __init__(self, engine: FakeTextEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.exit_status: int | None = None
        self.failure: BaseException | None = None
        self._config = config
        self._listener = bind(config)
        self.url = self._listener.url
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        async def main() -> int:
            app = create_app(self.engine, self._config)  # type: ignore[arg-type]
            self.state = app.state.serve
            self._loop = asyncio.get_running_loop()
            self._server = HttpServer(app, self.engine, self._config, self._listener)  # type: ignore[arg-type]
            self._ready.set()
            return await self._server.run()

        try:
            with self._listener:
                self.exit_status = asyncio.run(main())
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._server.stop)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def live_server(engine: FakeTextEngine | None = None, **options: object) -> Iterator[LiveServer]:
    """Run a server of one's own, for options that differ from the shared one."""
    config = ServerConfig(**{"port": 0, "shutdown_timeout_s": 5.0, **options})  # type: ignore[arg-type]
    server = LiveServer(engine or FakeTextEngine(), config)
    try:
        yield server
    finally:
        if server._thread.is_alive():
            server.stop()
        server.join()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> LiveServer:
    shared_server.engine.reset()
    return shared_server


@pytest.fixture
def engine(server: LiveServer) -> FakeTextEngine:
    return server.engine


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as made:
        yield made


@pytest.fixture(scope="session")
def new_server():
    return live_server

"""A server process with a scripted engine, for tests of signals: the first request runs until it is ended."""

from __future__ import annotations

import asyncio
import sys

from http_fake_engine import FakeTextEngine, Hold

from headrace.config import ServerConfig
from headrace.engine.request_output import OutputChunk
from headrace.serve.app import create_app
from headrace.serve.http_server import HttpServer
from headrace.serve.listen import bind


async def main() -> int:
    config = ServerConfig(port=0, shutdown_timeout_s=float(sys.argv[1]))
    engine = FakeTextEngine()
    engine.script = lambda call: [OutputChunk(0, "started", [1], prompt_token_ids=[5]), Hold()]
    with bind(config) as listener:
        return await HttpServer(create_app(engine, config), engine, config, listener).run()


sys.exit(asyncio.run(main()))

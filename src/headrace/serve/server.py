"""`run_server`: the server process from the command line's options to its exit status.

The core process is started before the web framework is imported, so that both load at once. Must not know endpoints,
and must not import anything heavy at module level.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.base.log import adopt_logger, setup_logging
from headrace.config import EngineConfig, ServerConfig
from headrace.serve.listen import bind


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve a model until SIGTERM or SIGINT.

    Args:
        engine_config: the engine's options.
        server_config: the server's options; a key in ``HEADRACE_API_KEY`` is added.

    Returns:
        Exit status: 0 after an orderly stop, 1 if the engine has failed for good.

    Raises:
        ConfigError: an empty key, salts for keys that are not there, or no such address.
        AddressInUseError: the address is taken or not allowed.
        HeadraceError: the model cannot be loaded.
    """
    setup_logging()
    adopt_logger("uvicorn")
    server_config = _with_environment(server_config)
    # Before the model: an address that is taken is found out in milliseconds.
    with bind(server_config) as listener:
        from headrace.engine.text_engine import TextEngine

        engine = TextEngine(engine_config, max_core_restarts=server_config.max_core_restarts)
        engine.launch()

        from headrace.serve.app import create_app
        from headrace.serve.http_server import HttpServer

        app = create_app(engine, server_config)
        engine.mark_startup("import of the web framework")
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(HttpServer(app, engine, server_config, listener).run())


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where there is one."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _with_environment(config: ServerConfig) -> ServerConfig:
    if any(not key.strip() for key in config.api_key):
        raise ConfigError(
            "--api-key is empty, so every client could guess it; give a key or remove it", param="api_key"
        )
    if key := env.read("HEADRACE_API_KEY"):
        config = dataclasses.replace(config, api_key=(*config.api_key, key))
    if config.salt_per_api_key and not config.api_key:
        raise ConfigError(
            "--salt-per-api-key needs keys to make salts of: give --api-key or HEADRACE_API_KEY",
            param="salt_per_api_key",
        )
    return config

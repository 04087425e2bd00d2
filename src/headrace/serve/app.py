"""The FastAPI application: middleware, error handlers and routers of one server around one engine.

Must not start or stop the engine and must not open sockets; see `server`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.config.server import ServerConfig
from headrace.observe.metrics import ServerMetrics
from headrace.serve.admin import health, metrics, version
from headrace.serve.auth import ApiKeyMiddleware
from headrace.serve.context import ServeState
from headrace.serve.errors import error_response, from_http_exception, internal_error
from headrace.serve.limits import BodyTooLarge, answer_too_large
from headrace.serve.openai import chat, completions, models, tokenize
from headrace.serve.openai.documented import install_openapi
from headrace.serve.request_ids import RequestIdMiddleware
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextEngine

_DESCRIPTION = "OpenAI's text API, served by Headrace. Unknown fields are refused; errors have OpenAI's envelope."


def create_app(engine: TextEngine, config: ServerConfig) -> FastAPI:
    """Build the application.

    Args:
        engine: started by the caller, before or after; until it is ready, requests get 503.
        config: the server's options.

    Returns:
        The application; ``app.state.serve`` is its `ServeState`.
    """
    app = FastAPI(title="Headrace", version=__version__, description=_DESCRIPTION, redirect_slashes=False)
    server_metrics = ServerMetrics(engine.model_name, stats=engine.stats, restarts=lambda: engine.health().restarts)
    app.state.serve = ServeState(engine, config, server_metrics)
    for module in (chat, completions, models, tokenize, health, version, metrics):
        app.include_router(module.router)
    _add_error_handlers(app)
    install_openapi(app)
    # The last one added is the outermost: ids for every answer, CORS before keys (a preflight carries none).
    if config.api_key:
        app.add_middleware(ApiKeyMiddleware, api_keys=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestIdMiddleware)
    return app


class _TooLarge(Response):
    """Answer to a body above the limit."""

    def __init__(self, error: BodyTooLarge) -> None:
        super().__init__(status_code=error.http_status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_too_large(self._error, scope, receive, send)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_headrace_error(_: Request, error: Exception) -> Response:
        if isinstance(error, BodyTooLarge):
            return _TooLarge(error)
        known = error if isinstance(error, HeadraceError) else internal_error(error)
        return error_response(known)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return error_response(internal_error(error))
        return from_http_exception(error, request, [*app.openapi()["paths"], "/docs", "/openapi.json"])

    async def on_fault(_: Request, error: Exception) -> Response:
        return error_response(internal_error(error))

    async def on_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        HeadraceError: on_headrace_error,
        HTTPException: on_http_exception,
        ClientDisconnect: on_disconnect,
        Exception: on_fault,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)

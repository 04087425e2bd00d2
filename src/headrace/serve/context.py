"""What every endpoint of one server shares: engine, configuration, metrics, and the requests in flight.

Must not contain the logic of any endpoint.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from starlette.requests import Request

from headrace.base.errors import EngineUnavailableError, HeadraceError, NotFoundError
from headrace.config.server import ServerConfig
from headrace.observe.metrics import ServerMetrics

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextEngine
    from headrace.serve.interrupt import Interruptible

_GUEST_THREADS = 2


class ServeState:
    """State of one server.

    Attributes:
        engine: the only way to the model.
        config: the server's options.
        metrics: where requests are counted.
        created_unix_s: when the server began; shown as the model's creation time.
        in_flight: generation requests that run now.
        guest_threads: where chat templates that came with requests are compiled and rendered.
    """

    def __init__(self, engine: TextEngine, config: ServerConfig, metrics: ServerMetrics) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.created_unix_s = int(time.time())
        self.in_flight: set[Interruptible] = set()
        self.guest_threads = ThreadPoolExecutor(_GUEST_THREADS, thread_name_prefix="guest-template")
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """True once the server was told to stop."""
        return self._stopping

    def stop_accepting(self) -> None:
        """Answer new requests with 503 from now on; running ones go on."""
        self._stopping = True

    def interrupt_all(self, error: HeadraceError) -> int:
        """End all running requests with an error; return how many there were."""
        running = list(self.in_flight)
        for request in running:
            request.interrupt(error)
        return len(running)

    def require_ready(self) -> None:
        """Refuse work that cannot be done now.

        Raises:
            EngineUnavailableError: the server starts or stops, or the engine is gone.
        """
        if self._stopping:
            raise EngineUnavailableError("the server is shutting down")
        health = self.engine.health()
        if health.state == "starting":
            raise EngineUnavailableError("the model is still loading; /health answers 200 when it is ready")
        if health.state == "failed":
            raise EngineUnavailableError("the engine has failed for good; restart the server (its log has the cause)")

    def require_model(self, name: str | None) -> None:
        """Check the model's name in a request; none means the served one.

        Raises:
            NotFoundError: another name; the message has the served one.
        """
        served = self.engine.model_name
        if name is not None and name != served:
            raise NotFoundError(
                f"the model '{name[:200]}' does not exist; this server serves '{served}'", param="model"
            )


def state_of(request: Request) -> ServeState:
    """Return the server's state (a FastAPI dependency)."""
    state: ServeState = request.app.state.serve
    return state

"""One life of the core process: the process, its socket, and the task that listens to it.

Nothing of a life is used again in the next one, so no late message can cross over. Must not know requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable

import zmq
import zmq.asyncio

from headrace.base.errors import ConfigError, EngineUnavailableError, HeadraceError, ProtocolError
from headrace.base.log import get_logger
from headrace.config import EngineConfig
from headrace.engine.core_launch import LaunchedCore
from headrace.types.error_records import error_of
from headrace.types.wire import (
    CoreFailed,
    CoreReady,
    Shutdown,
    StepOutputs,
    ToCore,
    UtilityReply,
    decode_from_core,
    encode,
)

_log = get_logger(__name__)
_DRAIN_MS = 50


class CoreLife:
    """Connects to a launched core and listens until `end`.

    Args:
        core: the process.
        context: ZeroMQ context of the client.
        on_outputs: called with the news of each step.
        on_reply: called with each answer to a control call.
    """

    def __init__(
        self,
        core: LaunchedCore,
        context: zmq.asyncio.Context,
        on_outputs: Callable[[StepOutputs], None],
        on_reply: Callable[[UtilityReply], None],
    ) -> None:
        self.core = core
        self.ready: CoreReady | None = None
        self.failure: CoreFailed | None = None
        self.exited = asyncio.Event()
        self._heard = asyncio.Event()
        self._on_outputs = on_outputs
        self._on_reply = on_reply
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(core.address)
        self._receiver = asyncio.create_task(self._receive(), name="core-receiver")
        self._receiver.add_done_callback(self._receiver_ended)
        self._watch_exit()

    async def settle(self) -> None:
        """Wait until the core is ready, or has ended (then everything it said has been taken)."""
        exited = asyncio.create_task(self.exited.wait())
        heard = asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait({exited, heard}, return_when=asyncio.FIRST_COMPLETED)
            if self.ready is None:
                await self.death()
        finally:
            exited.cancel()
            heard.cancel()
            await asyncio.gather(exited, heard, return_exceptions=True)

    async def death(self) -> None:
        """Wait for the end of the process, then take what it had still sent."""
        await self.exited.wait()
        while not self._receiver.done() and await self._socket.poll(timeout=_DRAIN_MS):
            await asyncio.sleep(0)

    def send(self, message: ToCore) -> None:
        """Send without waiting. If the core has just died the message is lost with the life.

        There is no high-water mark, so a connected socket takes the message at once.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is encoded already; see `send`."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(data)

    async def shut_down(self, timeout_s: float) -> None:
        """Ask a ready core to finish its step and go; give it ``timeout_s``. `end` does the rest."""
        if self.ready is None or self.exited.is_set():
            return
        self.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.exited.wait(), timeout_s)

    async def end(self) -> None:
        """Close the socket, kill the process and its ranks if they still live, and reap them."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._socket.close(linger=0)
        await asyncio.to_thread(self.core.destroy)

    def cause(self) -> str:
        """Return how this life ended, in words; call it after `end`."""
        text = f"the engine core (process {self.core.pid}) {self.core.describe_exit()}"
        return f"{text}: {self.failure.error.message}" if self.failure is not None else text

    def start_error(self) -> HeadraceError:
        """Return why the core did not become ready: its own error if it could still say it; call it after `end`."""
        if self.failure is not None:
            return error_of(self.failure.error)
        return EngineUnavailableError(f"{self.cause()} while starting; its last lines on standard error say more")

    @property
    def is_hopeless(self) -> bool:
        """True if it did not start for a reason that a restart cannot mend: the model or the configuration."""
        return self.ready is None and self.failure is not None and isinstance(self.start_error(), ConfigError)

    async def _receive(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = decode_from_core(data)
            except ProtocolError as error:
                _log.error("message of the core dropped: %s", error)
                continue
            if isinstance(message, StepOutputs):
                self._on_outputs(message)
            elif isinstance(message, UtilityReply):
                self._on_reply(message)
            else:
                if isinstance(message, CoreReady):
                    self.ready = message
                else:
                    self.failure = message
                self._heard.set()

    def _receiver_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # Nobody listens any more: end this life, so that the supervisor starts another one.
            _log.error("the core's messages cannot be handled", exc_info=task.exception())
            self.core.kill()

    def _watch_exit(self) -> None:
        """Set ``exited`` when the process ends: a thread that sleeps in the kernel, no polling."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self.core.wait_exit()
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                loop.call_soon_threadsafe(self.exited.set)

        threading.Thread(target=wait, name="core-exit-watch", daemon=True).start()


def pinned_config(config: EngineConfig, ready: CoreReady) -> EngineConfig:
    """Return the configuration with the sizes and endpoints that a life has found, for the next one."""
    # Several groups share the bytes, so no number of blocks says how much each has.
    groups = ready.layout.groups
    blocks = groups[0].num_blocks - 1 if len(groups) == 1 else config.cache.num_blocks_override
    events = config.events
    if ready.kv_events:
        live, sync = ready.kv_events
        events = dataclasses.replace(events, kv_events=live, kv_events_sync=sync)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=ready.max_model_len),
        cache=dataclasses.replace(
            config.cache, num_blocks_override=blocks, kv_cache_memory_bytes=ready.layout.total_bytes()
        ),
        events=events,
    )

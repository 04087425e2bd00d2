"""Entry of the engine-core process: a socket, an `EngineCore`, and the loop between them.

It takes messages between steps, blocks when idle, and ends when told to (message, SIGTERM) or when the front end is
gone. A fault ends the process: the front end restarts it. Must not import torch before the launch record is read.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from headrace.base.clock import SystemClock
from headrace.base.errors import ConfigError, HeadraceError, ProtocolError, RequestError
from headrace.base.log import get_logger, setup_logging
from headrace.engine.collector import Collector
from headrace.engine.core_launch import CoreLaunch, read_launch
from headrace.engine.flight_record import FlightRecorder
from headrace.observe.startup import StartupTable
from headrace.types.error_records import record_of
from headrace.types.wire import (
    CoreFailed,
    FromCore,
    Shutdown,
    StepOutputs,
    UtilityCall,
    UtilityReply,
    decode_to_core,
    encode,
)

if TYPE_CHECKING:
    from headrace.kv.events import KvEvent
    from headrace.observe.kv_events import KvEventPublisher

_log = get_logger(__name__)

EXIT_FAULT = 1
_LINGER_MS = 2000
_GRACE_S = 5.0
NOTICE_CALL_ID = -1
"""``UtilityReply.call_id`` of a complaint about a message that could not be read."""


class StopSignal:
    """Turns SIGTERM and the death of the front end into a flag and a readable descriptor.

    Args:
        parent_pipe: its end of file means that the front end is gone.
        runtime_dir: removed then, because nobody else will.
    """

    def __init__(self, parent_pipe: int, runtime_dir: str) -> None:
        self.requested = False
        self._runtime_dir = runtime_dir
        self.wake_descriptor, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGTERM, self._on_signal)
        # Ctrl-C is the front end's business; it ends this process in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch_parent, args=(parent_pipe,), name="parent-watch", daemon=True).start()

    def _on_signal(self, number: int, frame: Any) -> None:
        self.requested = True

    def _watch_parent(self, parent_pipe: int) -> None:
        while os.read(parent_pipe, 4096):
            pass
        self.requested = True
        os.write(self._wake_write, b"\0")
        shutil.rmtree(self._runtime_dir, ignore_errors=True)
        # The main thread may sit in a long step or in loading; nobody is left who could wait for it.
        threading.Event().wait(_GRACE_S)
        os._exit(EXIT_FAULT)


class CoreServer:
    """The loop between the socket and the core.

    Args:
        launch: what to start.
        stop: when to end.
        startup: the table of this process.
    """

    def __init__(self, launch: CoreLaunch, stop: StopSignal, startup: StartupTable) -> None:
        self._launch = launch
        self._stop = stop
        self._startup = startup
        self._events: KvEventPublisher | None = None
        self._clock = SystemClock()
        self._collector = Collector()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            # No limit here: the scheduler's queue limit bounds what comes in, and results must never block a step.
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(launch.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(stop.wake_descriptor, zmq.POLLIN)

    def run(self) -> int:
        """Serve until told to stop. Return the exit status."""
        core = None
        try:
            core = self._start_core()
            self._collector.settle(self._clock.now_s())
            while not self._stop.requested:
                self._receive(core)
                if core.has_work and not self._stop.requested:
                    self._send(core.step())
                    self._collector.stepped(self._clock.now_s())
            return 0
        except Exception as error:
            text = traceback.format_exc()
            if core is None and isinstance(error, HeadraceError):
                _log.debug("start-up failed; the front end tells the user\n%s", text)
            else:
                _log.error("the engine core ends: %s\n%s", error, text)
            self._send(CoreFailed(record_of(error), text))
            return EXIT_FAULT
        finally:
            if core is not None:
                core.close()
            if self._events is not None:
                self._events.close()
            self._socket.close()
            self._context.term()

    def _start_core(self) -> Any:
        from headrace.engine.core import EngineCore

        launch = self._launch
        recorder = FlightRecorder(Path(launch.flight_path), launch.config.scheduler.max_num_seqs)
        factory = _load(launch.executor_factory)
        self._startup.mark("imports")
        executor = factory(launch.config, Path(launch.runtime_dir))
        self._startup.mark("find model")
        wanted = launch.config.events.kv_events is not None
        core = EngineCore(
            launch.config,
            executor,
            self._clock,
            startup=self._startup,
            record=recorder.record,
            publish=self._publish if wanted else None,
        )
        ready = core.start()
        if wanted:
            ready = msgspec.structs.replace(ready, kv_events=self._start_events(core, ready.hash_tokens))
        self._send(ready)
        self._send(StepOutputs([], core.stats()))
        return core

    def _start_events(self, core: Any, hash_tokens: int) -> list[str]:
        """Open the sockets of the cache events; return where they listen."""
        from headrace.observe.kv_events import KvEventPublisher

        events = KvEventPublisher(self._launch.config.events, hash_tokens=hash_tokens, snapshot=core.kv_snapshot)
        self._events = events
        self._poller.register(events.socket, zmq.POLLIN)
        return [events.endpoint, events.sync_endpoint]

    def _publish(self, events: Sequence[KvEvent]) -> None:
        if self._events is not None:
            self._events.publish(events)

    def _receive(self, core: Any) -> None:
        """Take all messages that are there; wait for one only if there is nothing else to do."""
        if not core.has_work:
            if not self._poller.poll(0):
                self._collector.rest(self._clock.now_s())
            self._poller.poll()
        if self._events is not None:
            self._events.serve()
        while not self._stop.requested:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_core(data)
            except ProtocolError as error:
                _log.error("message dropped: %s", error)
                self._send(UtilityReply(NOTICE_CALL_ID, error=record_of(error)))
                continue
            if isinstance(message, UtilityCall):
                self._send(_answer(core, message))
            elif isinstance(message, Shutdown):
                self._stop.requested = True
            else:
                core.post(message)

    def _send(self, message: FromCore) -> None:
        self._socket.send(encode(message))


def _answer(core: Any, call: UtilityCall) -> UtilityReply:
    if call.method == "stats" and not call.args:
        return UtilityReply(call.call_id, core.stats())
    if call.method == "layout" and not call.args:
        return UtilityReply(call.call_id, core.layout)
    error = RequestError(f"no control call {call.method!r} with {len(call.args)} arguments; known: stats, layout")
    return UtilityReply(call.call_id, error=record_of(error))


def _load(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"executor factory {dotted!r}: {error}") from error


def main() -> int:
    """Run the core process on the launch record at standard input."""
    startup = StartupTable("engine core")
    setup_logging("core")
    parent_pipe = os.dup(0)
    # Ranks started later must not inherit the pipe, or they would outlive a dead front end.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        launch = read_launch(parent_pipe)
    except ProtocolError as error:
        _log.error("%s", error)
        return EXIT_FAULT
    stop = StopSignal(parent_pipe, launch.runtime_dir)
    startup.mark("python")
    return CoreServer(launch, stop, startup).run()


if __name__ == "__main__":
    sys.exit(main())

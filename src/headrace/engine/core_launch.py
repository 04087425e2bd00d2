"""Starts the core process as early as possible: needs no event loop, no socket, no torch, no tokenizer.

The child gets its launch record through its standard input, and that pipe stays open: its end of file tells the child
that the front end is gone, however it went. Must not outlive its process: `LaunchedCore.destroy` ends what it started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import msgspec

from headrace.base import env
from headrace.base.errors import ConfigError, ProtocolError
from headrace.config import EngineConfig

DEFAULT_EXECUTOR_FACTORY = "headrace.engine.executors:make_executor"
_HEADER_BYTES = 8
_LONGEST_SOCKET_PATH = 100
"""Linux allows 107 bytes in a socket address, macOS 103."""


class CoreLaunch(msgspec.Struct, frozen=True):
    """What the child is told at birth.

    Attributes:
        config: the engine configuration.
        address: ZeroMQ address to connect to.
        flight_path: file of the flight record.
        runtime_dir: the private directory.
        executor_factory: ``module:function`` that makes the executor from (config, runtime_dir).
    """

    config: EngineConfig
    address: str
    flight_path: str
    runtime_dir: str
    executor_factory: str = DEFAULT_EXECUTOR_FACTORY


class RuntimeDir:
    """A private directory (mode 0700) for sockets; removed on `close` and at interpreter exit at the latest."""

    def __init__(self) -> None:
        parent = env.read("HEADRACE_RUNTIME_DIR")
        try:
            self.path = Path(tempfile.mkdtemp(prefix="headrace-", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"no socket directory in {parent or tempfile.gettempdir()}: {error}; set HEADRACE_RUNTIME_DIR",
                param="HEADRACE_RUNTIME_DIR",
            ) from error
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        if len(os.fsencode(self.path)) + len("/core-000.sock") > _LONGEST_SOCKET_PATH:
            path = self.path
            self.close()
            raise ConfigError(
                f"socket directory {path} has too long a name; set HEADRACE_RUNTIME_DIR to a shorter one",
                param="HEADRACE_RUNTIME_DIR",
            )

    def close(self) -> None:
        """Remove the directory; safe to call twice."""
        self._remove()


class LaunchedCore:
    """A core process and the names of what connects it. Made by `launch_core`."""

    def __init__(self, process: subprocess.Popen[bytes], launch: CoreLaunch) -> None:
        self.process = process
        self.address = launch.address
        self.flight_path = Path(launch.flight_path)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self.process.pid

    def wait_exit(self) -> None:
        """Block until the process has ended; leaves it unreaped where possible, so that its group id stays taken."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return
        self.process.wait()

    def describe_exit(self) -> str:
        """Return how the process ended, in words; call it after `destroy`."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def kill(self) -> None:
        """Kill the process and its ranks at once: they share its group, so they go even if the core is dead already."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def destroy(self) -> None:
        """Kill the process and its ranks, and reap it. Safe to call on a dead one, and twice."""
        self.kill()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.process.wait()


def launch_core(
    config: EngineConfig, runtime_dir: Path, life: int = 0, executor_factory: str = DEFAULT_EXECUTOR_FACTORY
) -> LaunchedCore:
    """Start a core process.

    Args:
        config: the engine configuration.
        runtime_dir: private directory for its socket and flight record.
        life: number of the process within this front end; each life has names of its own.
        executor_factory: see `CoreLaunch`.

    Returns:
        The running process. It connects to ``address``; whether it starts well comes through the socket.
    """
    launch = CoreLaunch(
        config=config,
        address=f"ipc://{runtime_dir}/core-{life}.sock",
        flight_path=str(runtime_dir / f"flight-{life}"),
        runtime_dir=str(runtime_dir),
        executor_factory=executor_factory,
    )
    process = subprocess.Popen(
        # -P: a file in the user's directory must never stand in for a module of the engine.
        [sys.executable, "-P", "-m", "headrace.engine.core_process"],
        stdin=subprocess.PIPE,
        stdout=2,
        # Of its own group: Ctrl-C in a terminal reaches the front end, which ends the core in order.
        process_group=0,
    )
    core = LaunchedCore(process, launch)
    payload = msgspec.msgpack.encode(launch)
    try:
        if process.stdin is not None:
            process.stdin.write(len(payload).to_bytes(_HEADER_BYTES, "little") + payload)
            process.stdin.flush()
    except BrokenPipeError:
        pass  # it died at birth; the monitor reports how
    return core


def read_launch(descriptor: int) -> CoreLaunch:
    """Read the launch record in the child; the descriptor stays open.

    Raises:
        ProtocolError: the parent went away or is of another version.
    """
    length = int.from_bytes(_read_exactly(descriptor, _HEADER_BYTES), "little")
    try:
        return msgspec.msgpack.decode(_read_exactly(descriptor, length), type=CoreLaunch)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"launch record: {error}") from error


def _read_exactly(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = os.read(descriptor, length - len(data))
        if not piece:
            raise ProtocolError("the front end went away before the launch record was complete")
        data += piece
    return data

"""One process a rank on one machine: plans go out over pipes, rank 0's result comes back.

A rank that dies or raises becomes one typed error that tells the state of every rank. Every wait watches the ranks'
sentinels; every end is bounded: join, then terminate, then kill. Must not import torch or ``worker``.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeVar

import msgspec

from headrace.base.errors import EngineUnavailableError, invariant
from headrace.base.log import get_logger
from headrace.parallel.executor import MakeWorker
from headrace.parallel.rank_process import (
    ENCODER,
    FROM_RANK,
    Allocate,
    Allocated,
    Execute,
    Executed,
    Failed,
    FromRank,
    Loaded,
    Stop,
    ToRank,
    rank_main,
)
from headrace.parallel.rendezvous import PrivateFolder, single_node
from headrace.types.cache_specs import KvLayout
from headrace.types.error_records import error_of
from headrace.types.plans import StepPlan
from headrace.types.results import StepResult
from headrace.types.worker_facts import WorkerFacts

_log = get_logger(__name__)
Reply = TypeVar("Reply", Loaded, Allocated, Executed)

AFTERMATH_S = 2.0
"""How long the other ranks may take to fail too, once one has, so that the error can name the first cause."""


class Rank:
    """One rank as its parent sees it."""

    def __init__(self, index: int, process: SpawnProcess, pipe: Connection) -> None:
        self.index = index
        self.process = process
        self.pipe = pipe
        self.failure: Failed | None = None
        self.pipe_open = True
        self.inbox: deque[FromRank] = deque()

    def drain(self) -> None:
        """Read what the rank has sent, without waiting."""
        try:
            while self.pipe_open and self.pipe.poll():
                message = FROM_RANK.decode(self.pipe.recv_bytes())
                if isinstance(message, Failed):
                    self.failure = message
                else:
                    self.inbox.append(message)
        except (EOFError, OSError):
            self.pipe_open = False

    @property
    def lost(self) -> bool:
        """True if the rank has failed or ended."""
        return self.failure is not None or not self.pipe_open or self.process.exitcode is not None

    def describe(self) -> str:
        """Return the state in words."""
        code = self.process.exitcode
        if self.failure is not None:
            ended = "" if code is None else f" (exit code {code})"
            return f"rank {self.index}: {self.failure.error.message}{ended}"
        if code is None:
            return f"rank {self.index}: running"
        if code < 0:
            return f"rank {self.index}: killed by {_signal_name(-code)} (exit code {code})"
        return f"rank {self.index}: ended with exit code {code}"


class MultiprocessExecutor:
    """Runs ``size`` ranks in processes of their own.

    Args:
        make_worker: picklable; called in each rank's process.
        size: number of ranks.
        runtime_dir: parent of the private folder where the ranks meet; None is the temporary directory.
        collective_timeout_s: bound of every collective; a rank that waits longer fails.
        start_timeout_s: bound of loading the model.
        close_timeout_s: bound of each of join, terminate and kill.
    """

    def __init__(
        self,
        make_worker: MakeWorker,
        size: int,
        runtime_dir: str | None = None,
        *,
        collective_timeout_s: float = 300.0,
        start_timeout_s: float = 1800.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._make_worker = make_worker
        self._size = size
        self._runtime_dir = runtime_dir
        self._collective_timeout_s = collective_timeout_s
        self._start_timeout_s = start_timeout_s
        self._close_timeout_s = close_timeout_s
        self._folder: PrivateFolder | None = None
        self._ranks: list[Rank] = []
        self._in_flight = 0
        self._serving = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def start(self) -> WorkerFacts:
        """See `Executor.start`."""
        invariant(not self._ranks, "the executor is already started")
        self._folder = PrivateFolder(self._runtime_dir)
        init_method = single_node(self._folder.path)
        context = multiprocessing.get_context("spawn")
        try:
            for index in range(self._size):
                self._spawn(context, index, init_method)
            loaded = self._replies(Loaded, self._start_timeout_s)
        except BaseException:
            self.close()
            raise
        least_bytes = min(reply.facts.cache_bytes for reply in loaded)
        return msgspec.structs.replace(loaded[0].facts, cache_bytes=least_bytes)

    def allocate(self, layout: KvLayout) -> None:
        """See `Executor.allocate`."""
        self._broadcast(Allocate(layout))
        self._replies(Allocated, self._start_timeout_s)
        self._serving = True

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        self._broadcast(Execute(plan))
        self._in_flight += 1

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        invariant(self._in_flight > 0, "collect() without a submitted plan")
        # No deadline of its own: a step may be long, and a stuck collective fails within its own time-out.
        reply = self._reply(self._ranks[0], Executed, None)
        self._in_flight -= 1
        return reply.result

    def close(self) -> None:
        """See `Executor.close`."""
        for rank in self._ranks:
            if rank.process.exitcode is None and rank.failure is None:
                self._try_send(rank, ENCODER.encode(Stop()))
        self._end_processes()
        for rank in self._ranks:
            rank.pipe.close()
            # Refused for a process that even SIGKILL could not end yet; the system reaps it later.
            with suppress(ValueError):
                rank.process.close()
        self._ranks, self._in_flight, self._serving = [], 0, False
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _spawn(self, context: multiprocessing.context.SpawnContext, index: int, init_method: str) -> None:
        pipe, pipe_of_rank = context.Pipe(duplex=True)
        process = context.Process(
            target=rank_main,
            args=(
                self._make_worker,
                index,
                self._size,
                init_method,
                self._collective_timeout_s,
                pipe_of_rank,
            ),
            name=f"headrace-rank-{index}",
            daemon=True,
        )
        process.start()
        # The child holds its own end now; our copy must go, or the end of the child would not close the pipe.
        pipe_of_rank.close()
        self._ranks.append(Rank(index, process, pipe))

    def _broadcast(self, message: ToRank) -> None:
        invariant(bool(self._ranks), "the executor is not started")
        data = ENCODER.encode(message)
        for rank in self._ranks:
            if not self._try_send(rank, data):
                self._fail()

    @staticmethod
    def _try_send(rank: Rank, data: bytes) -> bool:
        try:
            rank.pipe.send_bytes(data)
        except OSError:
            return False
        return True

    def _replies(self, kind: type[Reply], timeout_s: float) -> list[Reply]:
        deadline_s = time.monotonic() + timeout_s
        return [self._reply(rank, kind, deadline_s) for rank in self._ranks]

    def _reply(self, rank: Rank, kind: type[Reply], deadline_s: float | None) -> Reply:
        """Wait for one message of a rank, while watching all ranks."""
        while not rank.inbox:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                states = "; ".join(each.describe() for each in self._ranks)
                raise EngineUnavailableError(f"rank {rank.index} did not answer in time; {states}")
            self._wait_any(left_s)
            # An answer that was sent before another rank fell still counts.
            if not rank.inbox and any(each.lost for each in self._ranks):
                self._fail()
        message = rank.inbox.popleft()
        if not isinstance(message, kind):
            raise EngineUnavailableError(f"rank {rank.index} sent {type(message).__name__}, expected {kind.__name__}")
        return message

    def _wait_any(self, timeout_s: float | None) -> None:
        """Wait until some rank sends or ends, then read everything."""
        sources: list[Connection | int] = [rank.pipe for rank in self._ranks if rank.pipe_open]
        sources += [rank.process.sentinel for rank in self._ranks if rank.process.exitcode is None]
        wait(sources, timeout_s)
        for rank in self._ranks:
            rank.drain()

    def _fail(self) -> None:
        """Raise the error of the rank that fell first.

        A rank that died without a word comes first: the others only report that it no longer answers.
        """
        deadline_s = time.monotonic() + AFTERMATH_S
        while (left_s := deadline_s - time.monotonic()) > 0 and any(
            rank.process.exitcode is None for rank in self._ranks
        ):
            self._wait_any(left_s)
        for rank in self._ranks:
            rank.drain()
        typed = [rank.failure for rank in self._ranks if rank.failure is not None and rank.failure.typed]
        silent = [rank for rank in self._ranks if rank.failure is None and rank.process.exitcode is not None]
        if typed and not silent and not self._serving:
            # While loading, what went wrong is the user's to mend: keep the type and the text. Stacks would hide it.
            raise error_of(typed[0].error)
        for rank in self._ranks:
            if rank.failure is not None:
                _log.error("rank %d failed:\n%s", rank.index, rank.failure.trace.rstrip())
        first = [*silent, *(rank for rank in self._ranks if rank not in silent)]
        raise EngineUnavailableError(
            f"tensor-parallel group of {self._size} is lost: " + "; ".join(rank.describe() for rank in first)
        )

    def _end_processes(self) -> None:
        for end in (None, SpawnProcess.terminate, SpawnProcess.kill):
            deadline_s = time.monotonic() + self._close_timeout_s
            for rank in self._ranks:
                if end is not None and rank.process.exitcode is None:
                    _log.warning("rank %d does not end; sending it %s", rank.index, end.__name__)
                    end(rank.process)
            for rank in self._ranks:
                rank.process.join(max(0.0, deadline_s - time.monotonic()))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""The process of one rank: joins the group, makes its worker, obeys its pipe. Ends when its parent ends.

Messages are tagged msgpack. Must not decide anything: order and recovery belong to the executor.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.log import get_logger, setup_logging
from headrace.types.cache_specs import KvLayout
from headrace.types.error_records import record_of
from headrace.types.outputs import ErrorRecord
from headrace.types.plans import StepPlan
from headrace.types.results import StepResult
from headrace.types.token_ids import decode_tokens, encode_tokens
from headrace.types.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from headrace.parallel.executor import MakeWorker, WorkerLike

_log = get_logger(__name__)

ORPHAN_EXIT_CODE = 17
FAILED_EXIT_CODE = 1


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Make the KV memory; answered by `Allocated`."""

    layout: KvLayout


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="execute"):
    """Run a step; rank 0 answers with `Executed`."""

    plan: StepPlan


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Leave the group and exit with status 0."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The first message of a rank."""

    facts: WorkerFacts


class Allocated(msgspec.Struct, frozen=True, array_like=True, tag="allocated"):
    """The KV memory is there."""


class Executed(msgspec.Struct, frozen=True, array_like=True, tag="executed"):
    """The result of a step."""

    result: StepResult


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The last message of a rank that cannot go on.

    Attributes:
        error: what it raised.
        typed: it is an error of our own, with a message for the user.
        trace: the traceback.
    """

    error: ErrorRecord
    typed: bool
    trace: str


ToRank = Allocate | Execute | Stop
FromRank = Loaded | Allocated | Executed | Failed

ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_tokens)
_TO_RANK = msgspec.msgpack.Decoder(ToRank)
FROM_RANK = msgspec.msgpack.Decoder(FromRank)


def rank_main(
    make_worker: MakeWorker,
    rank: int,
    size: int,
    init_method: str,
    collective_timeout_s: float,
    pipe: Connection,
) -> None:
    """Entry of a rank's process.

    Args:
        make_worker: makes the worker of this rank.
        rank: of this process.
        size: number of ranks.
        init_method: where the ranks meet.
        collective_timeout_s: bound of every collective.
        pipe: commands in, answers out; its end means that the parent is gone.
    """
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = _read_commands(pipe)
    setup_logging(f"rank {rank}")
    try:
        _serve(make_worker, rank, size, init_method, collective_timeout_s, pipe, commands)
    except Exception as error:
        _report(pipe, error)
        # A collective of another thread, or the group's own clean-up, may wait for a lost rank: leave at once.
        os._exit(FAILED_EXIT_CODE)


def _serve(
    make_worker: MakeWorker,
    rank: int,
    size: int,
    init_method: str,
    collective_timeout_s: float,
    pipe: Connection,
    commands: SimpleQueue[ToRank],
) -> None:
    from headrace.parallel.groups import TensorParallel
    from headrace.parallel.rendezvous import process_group

    with process_group(init_method, rank, size, collective_timeout_s):
        worker = make_worker(TensorParallel(rank, size))
        pipe.send_bytes(ENCODER.encode(Loaded(worker.load())))
        while True:
            command = commands.get()
            if isinstance(command, Stop):
                return
            _obey(command, worker, rank, pipe)


def _obey(command: Allocate | Execute, worker: WorkerLike, rank: int, pipe: Connection) -> None:
    if isinstance(command, Allocate):
        worker.allocate(command.layout)
        pipe.send_bytes(ENCODER.encode(Allocated()))
        return
    result = worker.execute(command.plan)
    if rank == 0:
        pipe.send_bytes(ENCODER.encode(Executed(result)))


def _report(pipe: Connection, error: Exception) -> None:
    trace = "".join(traceback.format_exception(error))
    failed = Failed(record_of(error), isinstance(error, HeadraceError), trace)
    try:
        pipe.send_bytes(ENCODER.encode(failed))
        pipe.close()
    except OSError:
        # The parent is gone; nobody is left to read the report.
        os._exit(ORPHAN_EXIT_CODE)


def _read_commands(pipe: Connection) -> SimpleQueue[ToRank]:
    """Read commands in a thread of its own, into a queue.

    The parent can then always send, even while this rank is busy or itself sends a large answer; and the end of the
    parent is seen at once, also in the middle of a step.
    """
    commands: SimpleQueue[ToRank] = SimpleQueue()

    def read(leave: Callable[[int], None] = os._exit) -> None:
        try:
            while True:
                command = _TO_RANK.decode(pipe.recv_bytes())
                if isinstance(command, Execute):
                    for start in command.plan.starts:
                        msgspec.structs.force_setattr(start, "token_ids", decode_tokens(start.token_ids))
                commands.put(command)
                if isinstance(command, Stop):
                    return
        except (EOFError, OSError):
            leave(ORPHAN_EXIT_CODE)
        except msgspec.MsgspecError:
            _log.exception("a command of the executor cannot be read")
            leave(FAILED_EXIT_CODE)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands

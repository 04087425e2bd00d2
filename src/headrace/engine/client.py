"""The front end's view of the engine core: submit, abort, call; a crash of the core is a pause.

All state lives on one event loop. A request is registered before anything is sent or awaited. Each life of the core has
a process, a socket and names of its own, so nothing of a dead life can reach the next. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq.asyncio

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import (
    EngineFaultError,
    EngineUnavailableError,
    HeadraceError,
    InvariantError,
    OverloadedError,
)
from headrace.base.ids import RequestId
from headrace.base.log import get_logger
from headrace.config import EngineConfig
from headrace.engine.core_launch import DEFAULT_EXECUTOR_FACTORY, LaunchedCore, RuntimeDir, launch_core
from headrace.engine.core_life import CoreLife, pinned_config
from headrace.engine.delta_stream import DeltaStream
from headrace.engine.flight_record import read_flight_record
from headrace.engine.pending import PendingRequest
from headrace.engine.supervision import CrashLedger, RestartBudget
from headrace.types.error_records import error_of
from headrace.types.events import AbortRequest, AddRequest, ResetPrefixCache
from headrace.types.outputs import SchedulerStats
from headrace.types.requests import EngineRequest
from headrace.types.wire import CoreReady, StepOutputs, ToCore, UtilityCall, UtilityReply, encode

_log = get_logger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "stopped"]
_STOP_S = 10.0
_TOTALS = ("prefix_query_tokens", "prefix_hit_tokens", "preemptions", "prompt_tokens", "generation_tokens")
"""Running totals of `SchedulerStats`, which go on over the lives of the core."""


class CoreClient:
    """Owner of the core process.

    Args:
        config: the engine configuration.
        max_restarts: crashes within ten minutes that are answered by a restart.
        runtime_dir: private directory; a new one if not given.
        launched: a core that runs already (see `core_launch`), to save start-up time; needs ``runtime_dir``.
        executor_factory: ``module:function`` that makes the core's executor; tests put a fake device here.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_restarts: int = 5,
        runtime_dir: RuntimeDir | None = None,
        launched: LaunchedCore | None = None,
        executor_factory: str = DEFAULT_EXECUTOR_FACTORY,
        clock: Clock | None = None,
    ) -> None:
        self.state: State = "starting"
        self.restarts = 0
        self.failure: HeadraceError | None = None
        self._config = config
        self._clock = clock if clock is not None else SystemClock()
        self._runtime_dir = runtime_dir if runtime_dir is not None else RuntimeDir()
        self._launched = launched
        self._executor_factory = executor_factory
        self._budget = RestartBudget(max_restarts)
        self._ledger = CrashLedger()
        self._pending: dict[RequestId, PendingRequest] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call_id = 0
        self._lives = 0
        self._life: CoreLife | None = None
        self._context: zmq.asyncio.Context | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._ready: CoreReady | None = None
        self._stats = SchedulerStats()
        self._past = SchedulerStats()
        self._progress_s = self._clock.now_s()

    @property
    def ready(self) -> CoreReady:
        """Facts of the core, from the first start on.

        Raises:
            EngineUnavailableError: the core has not started yet.
        """
        if self._ready is None:
            raise EngineUnavailableError("the engine core is not ready yet")
        return self._ready

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._pending)

    @property
    def pid(self) -> int | None:
        """Process id of the present core, or None."""
        return self._life.core.pid if self._life is not None else None

    def stats(self) -> SchedulerStats:
        """Return the newest numbers of the scheduler; totals go on over restarts."""
        totals = {name: getattr(self._past, name) + getattr(self._stats, name) for name in _TOTALS}
        return msgspec.structs.replace(self._stats, **totals)

    def stalled_s(self) -> float:
        """Return seconds since the last completed step while there is work, else 0."""
        return self._clock.now_s() - self._progress_s if self._pending else 0.0

    async def start(self) -> CoreReady:
        """Start the core, or join the one already launched, and wait until it is ready.

        Raises:
            HeadraceError: the core's own error, if it could not start; nothing is left behind then.
        """
        try:
            life = await self._begin_life()
        except BaseException:
            await self.stop()
            raise
        if life.ready is None:
            await self.stop()
            self.state = "failed"
            self.failure = life.start_error()
            raise self.failure
        self._monitor = asyncio.create_task(self._supervise(), name="core-supervisor")
        return life.ready

    def open_stream(self, requests: Sequence[EngineRequest]) -> DeltaStream:
        """Register and send requests whose deltas arrive in one stream. Does not wait.

        During a restart the requests wait for the new core.

        Raises:
            EngineUnavailableError: the core is gone for good.
            OverloadedError: too many requests wait for the core to come back.
        """
        if self.state in ("failed", "stopped"):
            raise self._unavailable()
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids) or any(request_id in self._pending for request_id in ids):
            raise InvariantError(f"a request id of {ids} is in use")
        limit = self._config.scheduler.max_queue + self._config.scheduler.max_num_seqs
        if self.state != "ready" and len(self._pending) + len(requests) > limit:
            raise OverloadedError(f"{len(self._pending)} requests wait for the engine to restart; try again later")
        # Before anything is registered: what has no encoding fails its caller, never the restart that sends it again.
        messages = [encode(AddRequest(request)) for request in requests]
        if not self._pending:
            self._progress_s = self._clock.now_s()
        stream = DeltaStream(ids, self._abort_all)
        for request in requests:
            self._pending[request.request_id] = PendingRequest(request, stream)
        if self.state == "ready" and self._life is not None:
            for message in messages:
                self._life.send_encoded(message)
        return stream

    def submit(self, request: EngineRequest) -> DeltaStream:
        """Register and send one request; see `open_stream`."""
        return self.open_stream([request])

    def abort(self, request_id: RequestId) -> None:
        """End a request silently. Unknown and finished ids are ignored."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        pending.stream.drop(request_id)
        if self.state == "ready":
            self._send(AbortRequest(request_id))
        if self._ledger.forget(request_id):
            self._try_suspect()

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks that no request uses."""
        if self.state == "ready":
            self._send(ResetPrefixCache())

    async def call(self, method: str, *args: Any) -> Any:
        """Make a control call and return its plain result.

        Raises:
            EngineUnavailableError: the core is not there, or ended before the answer.
            HeadraceError: the core refused the call.
        """
        if self.state != "ready":
            raise self._unavailable()
        self._next_call_id += 1
        call_id = self._next_call_id
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(UtilityCall(call_id, method, list(args)))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the core in order, within a bounded time, and remove every trace. Safe to call twice.

        Args:
            timeout_s: seconds for the current step; after that the process is killed.
        """
        if self.state != "failed":
            self.state = "stopped"
        if self._monitor is not None:
            self._monitor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitor
            self._monitor = None
        self._fail_everything(EngineUnavailableError("the engine is shutting down"))
        life, self._life = self._life, None
        if life is not None:
            await life.shut_down(timeout_s)
            await life.end()
        if self._launched is not None:
            await asyncio.to_thread(self._launched.destroy)
            self._launched = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._runtime_dir.close()

    async def _begin_life(self) -> CoreLife:
        """Launch a core and wait until it is ready or gone."""
        core, self._launched = self._launched, None
        if core is None:
            core = launch_core(self._config, self._runtime_dir.path, self._lives, self._executor_factory)
        self._lives += 1
        if self._context is None:
            self._context = zmq.asyncio.Context()
        try:
            life = CoreLife(core, self._context, self._take, self._answer)
        except BaseException:
            core.destroy()
            raise
        self._life = life
        await life.settle()
        if life.ready is not None:
            self._ready = life.ready
            if life.ready.kv_events:
                _log.info("KV events on %s, replays and snapshots on %s", *life.ready.kv_events)
            # The next life must keep this one's promises, whatever memory there is then.
            self._config = pinned_config(self._config, life.ready)
            self._progress_s = self._clock.now_s()
            self.state = "ready"
            self._resubmit()
        return life

    def _take(self, outputs: StepOutputs) -> None:
        self._progress_s = self._clock.now_s()
        if outputs.stats is not None:
            self._stats = outputs.stats
        trial_over = False
        for delta in outputs.each():
            pending = self._pending.get(delta.request_id)
            if pending is None:
                continue  # aborted meanwhile: its final state is decided, whatever was under way
            delta = pending.take(delta)
            trial_over |= self._ledger.delivered(delta.request_id, len(delta.new_token_ids))
            if delta.finish_reason is not None:
                del self._pending[delta.request_id]
                trial_over |= self._ledger.forget(delta.request_id)
            pending.stream.put(delta)
        if trial_over:
            self._try_suspect()

    def _answer(self, reply: UtilityReply) -> None:
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            if reply.error is not None:
                _log.error("the core complains: %s", reply.error.message)
        elif reply.error is not None:
            future.set_exception(error_of(reply.error))
        else:
            future.set_result(reply.result)

    # Crashes.

    async def _supervise(self) -> None:
        """Wait for the end of the core, bring it back, again and again until the budget is spent."""
        try:
            while self._life is not None and self.state != "failed":
                await self._life.death()
                self.state = "restarting"
                await self._bring_back(self._life)
        except Exception as error:
            _log.exception("supervision of the engine core failed")
            self._give_up(f"supervision of the engine core failed: {error}")

    async def _bring_back(self, life: CoreLife) -> None:
        failed: list[RequestId] = []
        if life.ready is not None:
            failed = self._ledger.on_crash(list(self._pending), read_flight_record(life.core.flight_path))
            self._past = self.stats()
            self._stats = SchedulerStats()
        await life.end()
        cause = life.cause()
        _log.error("%s; %d requests are unfinished", cause, len(self._pending))
        self._fail_calls(EngineUnavailableError(f"{cause} before it answered"))
        for request_id in failed:
            self._fail_suspect(request_id, cause)
        if life.is_hopeless:
            self._give_up(f"the engine core cannot be restarted: {cause}")
        elif not self._budget.allows(self._clock.now_s()):
            self._give_up(f"the engine core crashed too often within ten minutes; last: {cause}")
        else:
            self.restarts += 1
            await self._begin_life()

    def _resubmit(self) -> None:
        """Send everything unfinished to the new core, but only one suspect."""
        if self._lives > 1:
            _log.warning("the engine core is back; %d requests go on", len(self._pending))
        with_core = self._pending.keys() - self._ledger.held
        for request_id, pending in self._pending.items():
            if request_id in with_core:
                self._send(AddRequest(pending.resubmission(with_core)))
        self._try_suspect()

    def _try_suspect(self) -> None:
        while self.state == "ready" and (request_id := self._ledger.next_trial()) is not None:
            pending = self._pending.get(request_id)
            if pending is not None:
                # On trial by itself: its leader may be held, or its cause.
                self._send(AddRequest(pending.resubmission(())))
                return
            self._ledger.forget(request_id)

    def _fail_suspect(self, request_id: RequestId, cause: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.stream.fail(
                EngineFaultError(
                    "this request was on the device in crashes of the engine core in a row and is taken as their "
                    f"cause; do not send it again unchanged. Last: {cause}"
                )
            )

    def _give_up(self, message: str) -> None:
        _log.error("%s", message)
        self.state = "failed"
        self.failure = EngineUnavailableError(message)
        self._fail_everything(self.failure)

    def _fail_everything(self, error: HeadraceError) -> None:
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            entry.stream.fail(error)
        self._fail_calls(error)

    def _fail_calls(self, error: HeadraceError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _abort_all(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self.abort(request_id)

    def _send(self, message: ToCore) -> None:
        if self._life is not None:
            self._life.send(message)

    def _unavailable(self) -> HeadraceError:
        return EngineUnavailableError(self.failure.message if self.failure else f"the engine is {self.state}")

"""An executor runs a plan on every rank and hands back one result. This file: the contract, and the one-rank executor.

Must not import ``worker``: what runs on a rank comes in as a callable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from headrace.base.errors import InvariantError, invariant
from headrace.types.cache_specs import KvLayout
from headrace.types.plans import StepPlan
from headrace.types.results import StepResult
from headrace.types.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from headrace.parallel.groups import TensorParallel


class WorkerLike(Protocol):
    """What runs on one rank; see `headrace.worker.worker.Worker`."""

    def load(self) -> WorkerFacts:
        """Build the model and load its weights."""
        ...

    def allocate(self, layout: KvLayout) -> None:
        """Make the KV memory."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        ...


MakeWorker = Callable[["TensorParallel"], WorkerLike]
"""Makes the worker of a rank, in that rank's process. Must be picklable for more than one rank."""


class Executor(Protocol):
    """Runs plans on all ranks, strictly in the order of submission."""

    def start(self) -> WorkerFacts:
        """Start the ranks and load the model.

        Returns:
            Facts of rank 0; ``cache_bytes`` is the least of all ranks.

        Raises:
            HeadraceError: what loading raised, or `EngineUnavailableError` if a rank died.
        """
        ...

    def allocate(self, layout: KvLayout) -> None:
        """Make the KV memory on every rank."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to all ranks; does not wait for its result."""
        ...

    def collect(self) -> StepResult:
        """Return the result of the oldest submitted plan that was not collected yet.

        Raises:
            EngineUnavailableError: a rank died or raised.
        """
        ...

    def close(self) -> None:
        """End all ranks. Safe to call twice, and after a failure."""
        ...


class InlineExecutor:
    """One rank, in this process. A plan runs when its result is collected.

    Args:
        make_worker: makes the worker.
    """

    def __init__(self, make_worker: MakeWorker) -> None:
        self._make_worker = make_worker
        self._worker: WorkerLike | None = None
        self._plans: deque[StepPlan] = deque()

    def start(self) -> WorkerFacts:
        """See `Executor.start`."""
        # Imported here: the parent of many ranks needs this module but not torch.
        from headrace.parallel.groups import TensorParallel

        self._worker = self._make_worker(TensorParallel(0, 1))
        return self._worker.load()

    def allocate(self, layout: KvLayout) -> None:
        """See `Executor.allocate`."""
        self._running().allocate(layout)

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        invariant(bool(self._plans), "collect() without a submitted plan")
        return self._running().execute(self._plans.popleft())

    def close(self) -> None:
        """See `Executor.close`."""
        self._worker = None
        self._plans.clear()

    def _running(self) -> WorkerLike:
        if self._worker is None:
            raise InvariantError("the executor is not started")
        return self._worker

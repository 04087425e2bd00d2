"""Makes the executor of a configuration: the one place that names the worker, and loads torch inside its functions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import EngineConfig
from headrace.platforms.openmp import limit_spinning
from headrace.weights.source import ModelFiles, resolve_model

if TYPE_CHECKING:
    from headrace.parallel.executor import Executor


@dataclass(frozen=True)
class WorkerMaker:
    """Picklable recipe for a worker: the multiprocess executor calls it in each rank's own process."""

    config: EngineConfig
    files: ModelFiles

    def __call__(self, tp: Any) -> Any:
        """Return the worker of rank ``tp``."""
        from headrace.worker.worker import Worker

        return Worker(self.config, self.files, tp)


def make_executor(config: EngineConfig, runtime_dir: Path | None = None, files: ModelFiles | None = None) -> Executor:
    """Return the executor of a configuration: in this process for one rank, a process for each rank otherwise.

    Args:
        config: the engine configuration.
        runtime_dir: private directory for the rendezvous file of several ranks.
        files: the model, if it is already resolved.

    Raises:
        ConfigError: the model cannot be found.
    """
    limit_spinning(os.environ)
    maker = WorkerMaker(config, files if files is not None else resolve_model(config.model))
    ranks = config.parallel.tensor_parallel_size
    if ranks == 1:
        from headrace.parallel.executor import InlineExecutor

        return InlineExecutor(maker)
    from headrace.parallel.executor_multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(maker, ranks, None if runtime_dir is None else str(runtime_dir))

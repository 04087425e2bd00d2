"""Workers for the executors' tests: one collective a step, and faults on order. Picklable; no model.

torch is imported in the ranks only.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from headrace.base.errors import InsufficientMemoryError
from headrace.base.ids import RequestId, Slot, StepId
from headrace.kv.budget import fixed_layout
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
from headrace.types.plans import PlanRow, StepPlan
from headrace.types.results import RowResult, StepResult
from headrace.types.wire import PhaseSeconds
from headrace.types.worker_facts import WorkerFacts

SPEC = FullAttentionSpec(kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4)
LAYOUT = fixed_layout([LayerCache(0, SPEC)], block_tokens=16, usable_blocks=3)


def plan(step, rows=1):
    return StepPlan(
        StepId(step), [], [], [], [PlanRow(Slot(slot), RequestId(f"r{slot}"), 0, 1, True) for slot in range(rows)]
    )


class SumWorker:
    """Answers each step with the sum over ranks of (rank + 1) * step."""

    def __init__(self, tp, fault=None, fault_rank=1, fault_step=0):
        self.tp = tp
        self.fault = fault if tp.rank == fault_rank else None
        self.fault_step = fault_step
        self.layout = None

    def load(self):
        import torch

        torch.set_num_threads(1)
        if self.fault == "load":
            raise InsufficientMemoryError("7 GiB wanted, 3 GiB there; lower --max-model-len", param="max_model_len")
        return WorkerFacts(
            [LayerCache(0, SPEC)], 1000 - self.tp.rank, 40, 128, 5, "float32", "cpu", "none", [PhaseSeconds("x", 0.5)]
        )

    def allocate(self, layout):
        self.layout = layout

    def execute(self, plan):
        import torch

        if plan.step == self.fault_step:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raise":
                raise ZeroDivisionError("a fault on order")
            if self.fault == "hang":
                threading.Event().wait()
        total = self.tp.all_reduce(torch.tensor([float(plan.step * (self.tp.rank + 1))]))
        return StepResult(plan.step, [RowResult([int(total[0])]) for _ in plan.rows])


@dataclass(frozen=True)
class Make:
    fault: str | None = None
    fault_step: int = 0

    def __call__(self, tp):
        return SumWorker(tp, self.fault, 1, self.fault_step)


class BulkWorker(SumWorker):
    """Answers with as much as no pipe can buffer."""

    def execute(self, plan):
        return StepResult(plan.step, [RowResult(list(range(500_000)))])


def make_bulk(tp):
    return BulkWorker(tp)

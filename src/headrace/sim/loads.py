"""Transfers into the simulated device's memory: from the plan that begins them to the report that ends them.

The blocks of an open transfer are written when it lands, at the last moment, so that a block which was given away too
early is overwritten under its new owner. Must not decide when or how well a transfer ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.sim.cells import Cells, demand
from headrace.sim.oracle import VOID
from headrace.types.plans import LoadJob


@dataclass(frozen=True)
class _Open:
    job: LoadJob
    contents: list[int]


class OpenLoads:
    """Transfers that have begun and not reported.

    Attributes:
        open_jobs: by id.
    """

    def __init__(self, cells: Cells) -> None:
        """Begin with none.

        Args:
            cells: where they write.
        """
        self._cells = cells
        self.open_jobs: dict[int, _Open] = {}
        self._seen: set[int] = set()

    def begin(self, job: LoadJob, contents: list[int]) -> None:
        """Begin a transfer: until it lands, what it is going to write is void.

        Args:
            job: of a plan.
            contents: what belongs into the positions from 0 to the job's end.
        """
        demand(job.job_id not in self._seen, f"the id of job {job.job_id} is used again")
        demand(job.start_tokens < job.end_tokens, f"job {job.job_id} loads nothing")
        demand(len(job.blocks) == len(self._cells.shapes), f"job {job.job_id} does not name the blocks of every group")
        demand(len(contents) == job.end_tokens, f"job {job.job_id} loads up to {job.end_tokens} of {len(contents)}")
        self._seen.add(job.job_id)
        self._fill(job, [VOID] * job.end_tokens)
        self.open_jobs[job.job_id] = _Open(job, contents)

    def holds(self, group: int, block: BlockId) -> bool:
        """Return whether an open transfer may still write into a block."""
        return any(block in entry.job.blocks[group] for entry in self.open_jobs.values())

    def land(self, job_id: int, valid_tokens: int) -> None:
        """End a transfer: what is valid is right, the rest is whatever the store had.

        Args:
            job_id: of the transfer.
            valid_tokens: everything before this position is right.
        """
        entry = self.open_jobs.pop(job_id)
        valid = max(0, min(valid_tokens, entry.job.end_tokens))
        self._fill(entry.job, entry.contents[:valid] + [VOID] * (entry.job.end_tokens - valid))

    def _fill(self, job: LoadJob, contents: list[int]) -> None:
        """Write the range of a job. Its blocks begin with the one in which the range begins."""
        for shape, blocks in zip(self._cells.shapes, job.blocks, strict=True):
            if shape.kind == "cross" or not blocks:
                continue
            if shape.kind == "recurrent":
                self._cells.writable(shape.group, blocks[0])[0] = contents[-1]
                continue
            size = shape.block_tokens
            first_block = job.start_tokens // size
            for place, block in enumerate(blocks):
                if block == NULL_BLOCK:
                    continue
                start = max(job.start_tokens, (first_block + place) * size)
                end = min(job.end_tokens, (first_block + place + 1) * size)
                table = [NULL_BLOCK] * (first_block + place) + [block]
                self._cells.write(shape.group, table, start, end, contents)

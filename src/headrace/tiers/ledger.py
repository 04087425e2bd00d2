"""Open transfers and the blocks that they may write: a job holds references from its issue to its report.

A request may end, be preempted or go on elsewhere meanwhile; its job keeps its blocks off the free list until every
rank has let go of them. Must not know requests beyond their ids, nor what a job is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import invariant
from headrace.base.ids import NULL_BLOCK, BlockId
from headrace.kv.pool import BlockPool
from headrace.types.plans import LoadJob


@dataclass(frozen=True)
class OpenJob:
    """A job that has not reported.

    Attributes:
        job: as planned.
        deadline_s: monotonic seconds after which nobody waits for it. Its blocks stay its own all the same.
    """

    job: LoadJob
    deadline_s: float


class JobLedger:
    """Every open job, by an id that is never used again."""

    def __init__(self, pools: Sequence[BlockPool], *, first_id: int = 1) -> None:
        """Make an empty ledger.

        Args:
            pools: of all groups, in order.
            first_id: of its first job. A core that follows a crashed one begins above all ids of that one, because
                reports to it may still be on their way.
        """
        self._pools = pools
        self._open: dict[int, OpenJob] = {}
        self._first_id = first_id
        self._last_id = first_id - 1

    def __len__(self) -> int:
        return len(self._open)

    @property
    def jobs(self) -> list[OpenJob]:
        """Open jobs, oldest first."""
        return list(self._open.values())

    def new_id(self) -> int:
        """Return an id for a job.

        Mutates: the count of ids.
        """
        self._last_id += 1
        return self._last_id

    def open(self, job: LoadJob, deadline_s: float) -> None:
        """Give a job references to its blocks, one for each distinct block that is not null.

        Args:
            job: with an id of `new_id`.
            deadline_s: see `OpenJob`.

        Mutates: the pools, the ledger.
        Requires: somebody holds the blocks; nobody reads them before the job has reported.
        """
        invariant(self._first_id <= job.job_id <= self._last_id, f"job {job.job_id} has an id that was never given out")
        invariant(job.job_id not in self._open, f"job {job.job_id} is open already")
        for pool, blocks in zip(self._pools, job.blocks, strict=True):
            pool.touch(_owned(blocks))
        self._open[job.job_id] = OpenJob(job, deadline_s)

    def close(self, job_id: int) -> LoadJob | None:
        """Take the references back: no rank touches the blocks any more.

        Args:
            job_id: of the report.

        Returns:
            The job, or None if no such job is open: a report that came twice, or of an earlier life. It changes
            nothing.

        Mutates: the pools (tail first, so that the beginning is evicted last), the ledger.
        """
        done = self._open.pop(job_id, None)
        if done is None:
            return None
        for pool, blocks in zip(self._pools, done.job.blocks, strict=True):
            pool.free(_owned(blocks))
        return done.job

    def held_blocks(self, group: int) -> set[BlockId]:
        """Return the blocks of a group that some open job may write."""
        return {block for entry in self._open.values() for block in _owned(entry.job.blocks[group])}


def _owned(blocks: Sequence[BlockId]) -> list[BlockId]:
    return list(dict.fromkeys(block for block in blocks if block != NULL_BLOCK))

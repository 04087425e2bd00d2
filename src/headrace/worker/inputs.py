"""Builds the model's inputs of one step from the plan's rows and the slots' state. Must not change the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.attention.contract import RowBatch
from headrace.attention.step import StepContext
from headrace.base.errors import InvariantError
from headrace.types.plans import PlanRow
from headrace.worker.state import BatchState


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one step; T tokens of all rows stand one after the other, in plan order.

    Attributes:
        token_ids: [T] int64.
        step: positions, and the rows of each group for the layers.
        offsets: [rows] index of each row's first token.
        sample_rows: indices of the rows that sample.
        sample_slots: [sampling rows] their slots.
        sample_places: [sampling rows] index among the T tokens whose logits they need.
    """

    token_ids: Tensor
    step: StepContext
    offsets: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    sample_slots: npt.NDArray[np.int64]
    sample_places: npt.NDArray[np.int64]


def build_inputs(rows: Sequence[PlanRow], state: BatchState, device: torch.device) -> StepInputs:
    """Return the inputs of a step.

    Args:
        rows: at least one.
        state: slots, with releases, starts and block appends of the plan already applied.
        device: where the model runs.

    Raises:
        InvariantError: a row does not fit its slot (wrong owner, tokens that are not known).
    """
    slots = np.array([row.slot for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    counts = np.array([row.tokens for row in rows], np.int64)
    ends = starts + counts
    samples = np.array([row.sample for row in rows], np.bool_)
    _check(rows, state, slots, ends, samples)
    after = counts.cumsum()
    offsets = after - counts
    total = int(after[-1])
    if total == len(rows):
        # Pure decode: one token a row, and it is the last known one unless a chunk happens to be one token long.
        ids, positions = state.last_tokens[slots], ends - 1
        for row in np.flatnonzero(ends != state.lengths[slots]).tolist():
            ids[row] = state.tokens(int(slots[row]))[starts[row]]
    else:
        positions = np.arange(total) - np.repeat(offsets - starts, counts)
        parts = [state.tokens(row.slot)[row.start : row.start + row.tokens] for row in rows]
        ids = np.concatenate(parts)
    sampling = np.flatnonzero(samples)
    return StepInputs(
        token_ids=torch.from_numpy(ids).to(device),
        step=StepContext(
            torch.from_numpy(positions).to(device),
            [RowBatch(starts, counts, tables, slots) for tables in state.block_tables],
        ),
        offsets=offsets,
        sample_rows=sampling,
        sample_slots=slots[sampling],
        sample_places=after[sampling] - 1,
    )


def _check(
    rows: Sequence[PlanRow],
    state: BatchState,
    slots: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    samples: npt.NDArray[np.bool_],
) -> None:
    known = state.lengths[slots]
    wrong = (ends > known) | (samples & (ends != known))
    if wrong.any():
        row = rows[int(np.flatnonzero(wrong)[0])]
        raise InvariantError(
            f"plan row for slot {row.slot}: tokens {row.start}..{row.start + row.tokens}, sample={row.sample}, "
            f"but {int(state.lengths[row.slot])} tokens are known"
        )
    for row in rows:
        if state.request_ids[row.slot] != row.request_id:
            raise InvariantError(f"slot {row.slot} belongs to {state.request_ids[row.slot]}, not to {row.request_id}")

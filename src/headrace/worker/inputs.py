"""Builds the model's inputs of one step from the plan and the slots' state. Must not change what the state means.

The batch of a step is its decodes and then its rows. Decodes have no objects of their own: their inputs are gathered
from the per-slot arrays at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.attention.contract import RowBatch
from headrace.attention.step import StepContext
from headrace.base.errors import InvariantError
from headrace.types.plans import StepPlan
from headrace.worker.state import BatchState


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one step; T tokens of the whole batch stand one after the other: decodes, then rows, in plan order.

    Attributes:
        token_ids: [T] int64.
        step: positions, and the batch of each group for the layers.
        slots: [batch] slot of each.
        offsets: [batch] index of the first token of each.
        sample_rows: indices of those that sample; all decodes do.
        sample_slots: [sampling] their slots.
        sample_places: [sampling] index among the T tokens whose logits they need.
    """

    token_ids: Tensor
    step: StepContext
    slots: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    sample_slots: npt.NDArray[np.int64]
    sample_places: npt.NDArray[np.int64]


def build_inputs(plan: StepPlan, state: BatchState, device: torch.device) -> StepInputs:
    """Return the inputs of a step.

    Args:
        plan: with something to compute.
        state: slots, with releases, starts and block appends of the plan already applied.
        device: where the model runs.

    Raises:
        InvariantError: a decode or a row does not fit its slot (wrong owner, tokens that are not known).
    """
    slots = np.array(plan.decodes, np.int64)
    starts = positions = state.lengths[slots] - 1
    _check_decodes(slots, positions)
    ids, counts, samples = state.last_tokens[slots], np.ones(slots.size, np.int64), np.ones(slots.size, np.bool_)
    if plan.rows:
        _check_rows(plan, state)
        ids = np.concatenate([ids, *[state.tokens(row.slot)[row.start : row.start + row.tokens] for row in plan.rows]])
        slots = np.concatenate([slots, [row.slot for row in plan.rows]])
        starts = np.concatenate([starts, [row.start for row in plan.rows]])
        counts = np.concatenate([counts, [row.tokens for row in plan.rows]])
        samples = np.concatenate([samples, [row.sample for row in plan.rows]])
    after = counts.cumsum()
    offsets = after - counts
    if plan.rows:
        positions = np.arange(int(after[-1])) - np.repeat(offsets - starts, counts)
    sampling = np.flatnonzero(samples)
    return StepInputs(
        token_ids=torch.from_numpy(ids).to(device),
        step=StepContext(
            torch.from_numpy(positions).to(device),
            [RowBatch(starts, counts, tables, slots) for tables in state.block_tables],
        ),
        slots=slots,
        offsets=offsets,
        sample_rows=sampling,
        sample_slots=slots[sampling],
        sample_places=after[sampling] - 1,
    )


def _check_decodes(slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
    if (positions < 0).any():
        raise InvariantError(f"slot {int(slots[positions < 0][0])} decodes but nobody holds it")
    if np.unique(slots).size != slots.size:
        raise InvariantError(f"a slot decodes twice in one step: {slots.tolist()}")


def _check_rows(plan: StepPlan, state: BatchState) -> None:
    decoding = set(plan.decodes)
    for row in plan.rows:
        if state.request_ids[row.slot] != row.request_id:
            raise InvariantError(f"slot {row.slot} belongs to {state.request_ids[row.slot]}, not to {row.request_id}")
        known, end = int(state.lengths[row.slot]), row.start + row.tokens
        if end > known or (row.sample and end != known):
            raise InvariantError(
                f"plan row for slot {row.slot}: tokens {row.start}..{end}, sample={row.sample}, but {known} tokens "
                "are known"
            )
        if row.slot in decoding:
            raise InvariantError(f"slot {row.slot} has a row beside its decode")

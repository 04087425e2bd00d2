"""What layers read of a step: positions, and for each group where its blocks or states are. Must not compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.attention.contract import AttentionBackend, Ints, RowBatch

Made = TypeVar("Made")


@dataclass(frozen=True)
class StateRows:
    """Rows of a step for the layers of a recurrent group.

    Attributes:
        ids: [R] int64 id of each row's working state.
        fresh: [R] bool; True where the row starts at position 0: its state is zero, whatever memory holds.
        starts: position of each row's first token.
        tokens: of each row; their sum is T.
    """

    ids: Tensor
    fresh: Tensor
    starts: list[int]
    tokens: list[int]


class StepContext:
    """Facts of one step. T tokens of all rows stand one after the other, in plan order.

    Attributes:
        positions: [T] int64, on the model's device.
        starts: [R] position of each row's first token.
        tokens: [R] tokens of each row.
        longest_tokens: above every position of the step.
        batches: rows with the tables of each group, by group.

    Args:
        positions: [T] int64.
        batches: the same rows with the tables of each group, by group; at least one.
    """

    def __init__(self, positions: Tensor, batches: Sequence[RowBatch]) -> None:
        self.positions = positions
        self.starts: Ints = batches[0].starts
        self.tokens: Ints = batches[0].tokens
        self.longest_tokens = int((self.starts + self.tokens).max())
        self.batches = batches
        self._prepared: dict[int, Any] = {}
        self._shared: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what ``make`` gives for a key in this step; made when the first layer asks.

        Args:
            key: of what is made; layers that share it must mean the same.
            make: makes it.
        """
        if key not in self._shared:
            self._shared[key] = make()
        made: Made = self._shared[key]
        return made

    def attention(self, group: int, backend: AttentionBackend) -> Any:
        """Return what a group's backend prepares for the step; made when the first layer of the group asks."""
        prepared = self._prepared.get(group)
        if prepared is None:
            prepared = self._prepared[group] = backend.prepare(self.batches[group])
        return prepared

    def state_rows(self, group: int) -> StateRows:
        """Return where the states of a recurrent group are; made when the first layer of the group asks."""
        found: StateRows | None = self._prepared.get(group)
        if found is None:
            batch, device = self.batches[group], self.positions.device
            ids = torch.from_numpy(batch.tables[batch.slots, 0]).to(device)
            fresh = torch.from_numpy(batch.starts == 0).to(device)
            found = self._prepared[group] = StateRows(ids, fresh, batch.starts.tolist(), batch.tokens.tolist())
        return found

"""Encoder outputs on the simulated device: what a worker keeps under each identifier, as plans tell it.

Must not decide what is kept; it only notices what is missing, superfluous or too much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.base.ids import RequestId, Slot
from headrace.sim.cells import demand
from headrace.types.plans import PlanRow, StepPlan
from headrace.types.requests import EngineRequest, MediaSpan


class _Owner(Protocol):
    request_id: RequestId
    source: EngineRequest


class EncoderOutputs:
    """The worker's map of encoder outputs.

    Attributes:
        rows: identifier -> rows of the output.
        encoded: how often an encoder ran.
        freed: how many outputs were dropped.
    """

    def __init__(self, capacity_rows: int, budget_rows: int) -> None:
        """Make an empty map.

        Args:
            capacity_rows: what may stay from step to step.
            budget_rows: what one step may encode; so much may lie beside the capacity while a step runs.
        """
        self._capacity_rows, self._budget_rows = capacity_rows, budget_rows
        self.rows: dict[str, int] = {}
        self.encoded = 0
        self.freed = 0

    def step(self, plan: StepPlan, slots: Mapping[Slot, _Owner]) -> None:
        """Drop and encode what a plan says, in this order."""
        for identifier in plan.encoder_frees:
            demand(identifier in self.rows, f"the encoder output {identifier!r} is dropped but not there")
            del self.rows[identifier]
            self.freed += 1
        budget = 0
        for item in plan.encodes:
            owner = slots.get(item.slot)
            good = owner is not None and owner.request_id == item.request_id
            demand(good, f"{item.request_id} encodes in slot {item.slot}, which is not its own")
            span = slots[item.slot].source.media[item.item]
            demand(span.identifier == item.identifier, f"{item.request_id}: item {item.item} is {span.identifier!r}")
            self.rows[item.identifier] = span.rows
            budget += span.rows
            self.encoded += 1
        if plan.encodes:
            demand(budget <= self._budget_rows, f"{budget} rows encoded in a step of {self._budget_rows}")
            kept = sum(rows for rows in self.rows.values() if rows <= self._capacity_rows)
            demand(kept <= self._capacity_rows, f"{kept} encoder rows kept of {self._capacity_rows}")
            beside = sum(rows for rows in self.rows.values() if rows > self._capacity_rows)
            demand(beside <= self._budget_rows, f"{beside} encoder rows beside the cache")

    def check_row(self, row: PlanRow, media: Sequence[MediaSpan], *, first: bool) -> None:
        """Every item that a row touches must be here; an item without positions when a stay in a slot begins."""
        end = row.start + row.tokens
        for span in media:
            needed = span.start < end and span.start + span.tokens > row.start if span.tokens else first
            if needed:
                demand(span.identifier in self.rows, f"{row.request_id} needs {span.identifier!r}, which is not there")

"""Runs one plan: state, inputs, model, sampling, result.

Must not load models and must not know where plans come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.attention.step import StepContext
from headrace.base.errors import InvariantError
from headrace.types.plans import BlockCopy, PlanRow, SlotStart, StepPlan
from headrace.types.results import RowResult, StepResult, TokenLogprobs
from headrace.worker.inputs import StepInputs, build_inputs
from headrace.worker.sampling.logprobs import position_logprobs, slice_positions
from headrace.worker.sampling.params_table import Feature
from headrace.worker.sampling.rowwise import row_finite
from headrace.worker.sampling.sampler import NON_FINITE, Sampler
from headrace.worker.state import BatchState


class RunnableModel(Protocol):
    """What the runner needs of a model; see `headrace.models`."""

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Return hidden states [T, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab]; the caller may overwrite them."""
        ...


class RunnableMemory(Protocol):
    """What the runner needs of the KV memory; see `headrace.attention.arena`."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, one after the other."""
        ...

    def observe(self, hidden: Tensor) -> None:
        """Look at the final hidden states of a step."""
        ...


class StepRunner:
    """Executes plans in order.

    Args:
        model: with its cache bound.
        memory: that the model is bound to.
        slots: most requests at once.
        vocab_tokens: width of the logits.
        device: where the model runs.
        with_logprobs: False on ranks whose result nobody reads.
    """

    def __init__(
        self,
        model: RunnableModel,
        memory: RunnableMemory,
        *,
        slots: int,
        vocab_tokens: int,
        device: torch.device,
        with_logprobs: bool = True,
    ) -> None:
        self.state = BatchState(slots, memory.groups)
        self.sampler = Sampler(slots, vocab_tokens, with_logprobs=with_logprobs)
        self._model = model
        self._memory = memory
        self._vocab_tokens = vocab_tokens
        self._device = device
        self._with_logprobs = with_logprobs

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Requires: plans come in order, the KV memory is bound, and inference mode is on.

        Args:
            plan: from the scheduler.

        Returns:
            One result a row and a token a decode. What cannot be served is named as an error; the others are
            unaffected.

        Raises:
            InvariantError: the plan contradicts the state, or asks for what no worker does yet; a bug of the scheduler
                or of this class.

        Mutates:
            The slots' state, the KV blocks of the plan's decodes and rows, and the targets of its copies and saves.
        """
        _check_supported(plan)
        self._apply(plan)
        self._memory.copy(plan.copies)
        if not (plan.decodes or plan.rows):
            self._memory.copy(plan.saves)
            return StepResult(plan.step, [])
        inputs = build_inputs(plan, self.state, self._device)
        hidden = self._model.forward(inputs.token_ids, inputs.step)
        self._memory.copy(plan.saves)
        self._memory.observe(hidden)
        prompt = self._prompt_logprobs(plan.rows, inputs, hidden)
        tokens, entries = self._sample(inputs, hidden)
        return self._result(plan, inputs, tokens, entries, prompt)

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            self.state.release(slot)
            self.sampler.release(slot)
        for start in plan.starts:
            self._start(start)
        for append in plan.appends:
            self.state.append_blocks(append)

    def _start(self, start: SlotStart) -> None:
        self.state.start(start)
        problem = self.sampler.start(start)
        tokens = self.state.tokens(start.slot)[: len(start.token_ids)]
        low, high = int(tokens.min()), int(tokens.max())
        if problem is None and (low < 0 or high >= self._vocab_tokens):
            wrong = low if low < 0 else high
            problem = f"prompt: token id {wrong} is outside the vocabulary of {self._vocab_tokens} tokens"
        if problem is not None:
            self.sampler.table.clear(start.slot)
            self.state.fail(start.slot, problem, self._vocab_tokens)

    def _result(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        tokens: list[int],
        entries: dict[int, TokenLogprobs],
        prompt: dict[int, list[TokenLogprobs]],
    ) -> StepResult:
        """Put the answers into the order of the plan. All decodes sample, so the first of ``tokens`` are theirs."""
        failures, decodes = self.state.failures, len(plan.decodes)
        failed = np.flatnonzero(self.state.failed[inputs.slots[:decodes]]).tolist()
        errors = [(index, failures[plan.decodes[index]] or "") for index in failed]
        of_rows = dict(zip(inputs.sample_rows[decodes:].tolist(), tokens[decodes:], strict=True))
        rows = []
        for index, row in enumerate(plan.rows, start=decodes):
            if (why := failures[row.slot]) is not None:
                rows.append(RowResult([], error=why))
                continue
            sampled = [of_rows[index]] if index in of_rows else []
            logprobs = [entries[index]] if index in entries else None
            rows.append(RowResult(sampled, logprobs, prompt.get(index)))
        return StepResult(plan.step, rows, tokens[:decodes], errors)

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Sample; return tokens aligned with ``inputs.sample_rows``, and log-probabilities by index in the batch."""
        rows, slots = inputs.sample_rows, inputs.sample_slots
        if not rows.size:
            return [], {}
        logits = self._model.logits(hidden[torch.from_numpy(inputs.sample_places).to(self._device)]).contiguous()
        positions = self.state.lengths[slots] - self.state.prompt_lengths[slots]
        sampled = self.sampler.sample(logits, slots, positions, self.state)
        for row, why in sampled.errors.items():
            slot = int(slots[row])
            if self.state.failures[slot] is None:
                self.state.fail(slot, why, self._vocab_tokens)
        # A failed row gets its placeholder too: the next plan may already count on one more token.
        self.state.append_tokens(slots, sampled.token_ids)
        return sampled.token_ids.tolist(), {int(rows[row]): entry for row, entry in sampled.logprobs.items()}

    def _prompt_logprobs(
        self, rows: Sequence[PlanRow], inputs: StepInputs, hidden: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Return the prompt's log-probabilities of the rows that ask for them, by index in the batch."""
        features = self.sampler.table.features
        found: dict[int, list[TokenLogprobs]] = {}
        for index, row in enumerate(rows, start=len(inputs.slots) - len(rows)):
            if not features[row.slot] & Feature.PROMPT_LOGPROBS:
                continue
            # The state at position p tells about the token at p + 1.
            last = min(row.start + row.tokens, int(self.state.prompt_lengths[row.slot]) - 1)
            targets = self.state.tokens(row.slot)[row.start + 1 : last + 1]
            first = int(inputs.offsets[index])
            top = int(self.sampler.table.prompt_logprobs[row.slot])
            entries = self._sliced_logprobs(hidden[first : first + len(targets)], targets, top)
            if entries is None:
                self.state.fail(row.slot, NON_FINITE, self._vocab_tokens)
            else:
                found[index] = entries
        return found

    def _sliced_logprobs(self, hidden: Tensor, targets: npt.NDArray[np.int64], top: int) -> list[TokenLogprobs] | None:
        """Return entries for consecutive positions, a slice of logits at a time; None if some are not finite."""
        width = slice_positions(self._vocab_tokens)
        entries: list[TokenLogprobs] = []
        healthy = True
        for first in range(0, len(targets), width):
            part = targets[first : first + width]
            # Every rank takes part in making logits, whatever it does with them.
            logits = self._model.logits(hidden[first : first + width]).contiguous()
            healthy = healthy and bool(row_finite(logits).all())
            if healthy and self._with_logprobs:
                entries += position_logprobs(logits, part, np.full(len(part), top))
        return entries if healthy else None


def _check_supported(plan: StepPlan) -> None:
    """Refuse what the control plane can plan and this worker cannot do yet: it must not be ignored."""
    if plan.encodes or plan.encoder_frees:
        raise InvariantError(f"step {plan.step} runs an encoder: this worker has none")
    if plan.loads:
        raise InvariantError(f"step {plan.step} loads KV from outside: this worker has no connector")
    for row in plan.rows:
        if row.drafts or row.gated:
            what = "drafts" if row.drafts else "waits for a grammar"
            raise InvariantError(f"step {plan.step}: the row of slot {row.slot} {what}: this worker cannot do that")
    for start in plan.starts:
        if start.media or start.encoder_tokens:
            raise InvariantError(f"step {plan.step}: {start.request_id} brings media: this worker has no encoder")

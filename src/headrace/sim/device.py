"""A device without a model: it executes plans and knows what every KV slot should contain.

Each write stores the content that belongs there; each attention read recomputes and compares. So a block that was
freed too early, shared wrongly, hit under a wrong hash or addressed wrongly is found at the first read, although the
output may look right. The device believes the plan and nothing else; it must not look at the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.base.ids import NULL_BLOCK, BlockId, RequestId, Slot
from headrace.sim.oracle import ROOT_CONTENT, contents_of, next_content, sample
from headrace.types.cache_specs import KvLayout
from headrace.types.plans import BlockAppend, BlockCopy, PlanRow, SlotStart, StepPlan
from headrace.types.results import RowResult, StepResult, TokenLogprobs


class SimFault(AssertionError):
    """The system under test did something that must never happen."""


def demand(condition: bool, message: str) -> None:
    """Raise `SimFault` unless the condition holds."""
    if not condition:
        raise SimFault(message)


@dataclass
class DeviceSlot:
    """What a worker keeps for one request: its tokens and its copy of the block tables."""

    request_id: RequestId
    token_ids: list[int]
    contents: list[int]
    prompt_tokens: int
    computed_tokens: int
    tables: list[list[BlockId]]
    wants_prompt_logprobs: bool
    salt: str | None
    broken: bool = False

    def add_token(self, token_id: int) -> None:
        """Append a token that is now known."""
        before = self.contents[-1] if self.contents else ROOT_CONTENT
        self.token_ids.append(token_id)
        self.contents.append(next_content(before, token_id))


@dataclass(frozen=True)
class Facts:
    """What the device is told about the world beside its plans.

    Attributes:
        salt_of: tenant of a request: content of one tenant must never be read by another.
        fails_at: output position at which a request's logits are not finite, or None.
        is_published: whether a block of a group can be hit by others right now; nobody may write to it then.
    """

    salt_of: Callable[[RequestId], str | None]
    fails_at: Callable[[RequestId], int | None]
    is_published: Callable[[int, BlockId], bool]


@dataclass
class FakeDevice:
    """Executes plans in order."""

    layout: KvLayout
    num_slots: int
    budget_tokens: int
    vocab_tokens: int
    facts: Facts
    slots: dict[Slot, DeviceSlot] = field(default_factory=dict)
    executed_steps: int = 0
    reused_slots: int = 0
    """How often a slot was released and taken again in one plan."""

    def __post_init__(self) -> None:
        self.memory: list[dict[tuple[BlockId, int], tuple[int, str | None]]] = [{} for _ in self.layout.groups]

    def execute(self, plan: StepPlan) -> StepResult:
        """Do one step: releases, starts, appends, then all writes, then all reads, as a layer does it."""
        demand(plan.step == self.executed_steps, f"plan {plan.step} executed as number {self.executed_steps}")
        self.executed_steps += 1
        for slot in plan.releases:
            demand(slot in self.slots, f"slot {slot} released but not in use")
            del self.slots[slot]
        for start in plan.starts:
            self._start(start)
            self.reused_slots += start.slot in plan.releases
        for append in plan.appends:
            self._append(append)
        for copy in plan.copies:
            self._copy(copy)
        demand(plan.total_tokens <= self.budget_tokens, f"{plan.total_tokens} tokens planned in one step")
        decodes = [self._decode(slot) for slot in plan.decodes]
        work = [*decodes, *plan.rows]
        demand(len({row.slot for row in work}) == len(work), "a slot computes twice in one step")
        for row in work:
            self._write(row)
        answers = [self._read_and_sample(row) for row in decodes]
        return StepResult(
            plan.step,
            [self._read_and_sample(row) for row in plan.rows],
            [0 if answer.error is not None else answer.token_ids[0] for answer in answers],
            [(index, answer.error) for index, answer in enumerate(answers) if answer.error is not None],
        )

    def _decode(self, slot: Slot) -> PlanRow:
        """Return the row that a slot among the plan's decodes stands for."""
        if slot not in self.slots:
            raise SimFault(f"slot {slot} decodes but is free")
        state = self.slots[slot]
        demand(not state.wants_prompt_logprobs, f"{state.request_id} asks for more than a token")
        return PlanRow(slot, state.request_id, len(state.token_ids) - 1, 1, True)

    def cell(self, group: int, block: BlockId, offset_tokens: int) -> tuple[int, str | None] | None:
        """Return (content, tenant) of a KV slot, or None if nothing was ever written there."""
        return self.memory[group].get((block, offset_tokens))

    def _start(self, start: SlotStart) -> None:
        demand(0 <= start.slot < self.num_slots, f"slot {start.slot} does not exist")
        demand(start.slot not in self.slots, f"slot {start.slot} is taken while in use")
        demand(start.computed_tokens < len(start.token_ids), "a start leaves nothing to compute")
        self.slots[start.slot] = DeviceSlot(
            start.request_id,
            list(start.token_ids),
            contents_of(start.token_ids),
            start.prompt_tokens,
            start.computed_tokens,
            [list(table) for table in start.blocks],
            start.sampling.prompt_logprobs is not None,
            self.facts.salt_of(start.request_id),
        )
        demand(len(start.blocks) == len(self.layout.groups), "a start has a table for every group")

    def _append(self, append: BlockAppend) -> None:
        demand(append.slot in self.slots, f"blocks appended to slot {append.slot}, which is free")
        tables = self.slots[append.slot].tables
        for table, blocks in zip(tables, append.blocks, strict=True):
            table.extend(blocks)

    def _copy(self, copy: BlockCopy) -> None:
        memory = self.memory[copy.group]
        for offset in range(self.layout.groups[copy.group].block_tokens):
            cell = memory.get((copy.source, offset))
            if cell is not None:
                memory[copy.target, offset] = cell

    def _write(self, row: PlanRow) -> None:
        state = self.slots.get(row.slot)
        if state is None or state.request_id != row.request_id:
            raise SimFault(f"row for a slot of somebody else: {row}")
        demand(row.tokens >= 1 and row.start == state.computed_tokens, f"{row} at {state.computed_tokens} computed")
        end = row.start + row.tokens
        demand(end <= len(state.token_ids), f"{row} computes tokens that nobody knows ({len(state.token_ids)})")
        demand(row.sample == (end == len(state.token_ids)), f"{row} with {len(state.token_ids)} known tokens")
        fails_at = self.facts.fails_at(row.request_id)
        if row.sample and fails_at is not None and end - state.prompt_tokens >= fails_at:
            state.broken = True
        for group in self.layout.groups:
            for position in range(row.start, end):
                block, offset = self._place(state, group.group, group.block_tokens, position)
                if self.facts.is_published(group.group, block):
                    raise SimFault(f"{row.request_id} writes position {position} into block {block}, others may hit it")
                content = -1 if state.broken else state.contents[position]
                self.memory[group.group][block, offset] = (content, state.salt)
        state.computed_tokens = end

    def _place(self, state: DeviceSlot, group: int, block_tokens: int, position: int) -> tuple[BlockId, int]:
        table = state.tables[group]
        index, offset = divmod(position, block_tokens)
        if index >= len(table):
            raise SimFault(f"{state.request_id}: no block for position {position}, {len(table)} blocks")
        block = table[index]
        if not NULL_BLOCK < block < self.layout.groups[group].num_blocks:
            raise SimFault(f"{state.request_id} uses block {block}")
        return block, offset

    def _read_and_sample(self, row: PlanRow) -> RowResult:
        state = self.slots[row.slot]
        if state.broken:
            if row.sample:
                state.add_token(0)
                return RowResult([], error="logits are not finite")
            return RowResult([])
        for group in self.layout.groups:
            for position in range(row.start + row.tokens):
                block, offset = self._place(state, group.group, group.block_tokens, position)
                found = self.cell(group.group, block, offset)
                if found != (state.contents[position], state.salt):
                    raise SimFault(
                        f"step {self.executed_steps - 1}: {row.request_id} reads position {position} of group "
                        f"{group.group} in block {block}: {found} instead of {(state.contents[position], state.salt)}"
                    )
        entries = self._prompt_logprobs(state, row) if state.wants_prompt_logprobs else None
        if not row.sample:
            return RowResult([], prompt_logprobs=entries)
        token_id = sample(state.contents[row.start + row.tokens - 1], self.vocab_tokens)
        state.add_token(token_id)
        return RowResult([token_id], prompt_logprobs=entries)

    def _prompt_logprobs(self, state: DeviceSlot, row: PlanRow) -> list[TokenLogprobs]:
        positions = range(row.start + 1, min(row.start + row.tokens + 1, state.prompt_tokens))
        return [TokenLogprobs(state.token_ids[position], -float(position), 1, [], []) for position in positions]

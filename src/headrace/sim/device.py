"""A device without a model: it executes plans and knows what every KV cell should contain.

Each write stores the content that belongs there; each attention read recomputes and compares. So a block that was
freed too early, shared wrongly, hit under a wrong hash or addressed wrongly is found at the first read, although the
output may look right. The device believes the plan and nothing else; it must not look at the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.base.ids import NULL_BLOCK, BlockId, RequestId, Slot
from headrace.sim.cells import Cells, SimFault, demand
from headrace.sim.encoders import EncoderOutputs
from headrace.sim.loads import OpenLoads
from headrace.sim.oracle import VOID, Prefix, allowed_tokens, contents_of, encoder_content, prefix_of, sample
from headrace.types.cache_specs import KvLayout
from headrace.types.plans import BlockAppend, BlockCopy, PlanRow, SlotStart, StepPlan
from headrace.types.requests import EngineRequest
from headrace.types.results import RowResult, StepResult, TokenLogprobs


@dataclass(slots=True)
class DeviceSlot:
    """What a worker keeps for one request: its tokens and its copy of the block tables."""

    request_id: RequestId
    source: EngineRequest
    prefix: Prefix
    token_ids: list[int]
    contents: list[int]
    prompt_tokens: int
    computed_tokens: int
    tables: list[list[BlockId]]
    wants_prompt_logprobs: bool
    fails_at: int | None
    broken: bool = False
    begun: bool = False

    def add_tokens(self, token_ids: Iterable[int]) -> None:
        """Append tokens that are now known."""
        self.token_ids.extend(token_ids)
        self.prefix.extend(self.contents, self.token_ids)


@dataclass(frozen=True)
class Facts:
    """What the device is told about the world beside its plans.

    Attributes:
        source_of: what the front end sent: a slot start must agree with it.
        fails_at: output position at which a request's logits are not finite, or None.
        published_cells: how many cells of a block, from its first, can be hit by others right now.
        guess: a draft for a request: (request, position, the token that would be right) -> token.
        contents_of: what belongs into the first so many positions of a request.
        settled_tokens: output tokens of a request that the engine has: what a grammar's mask can know.
    """

    source_of: Callable[[RequestId], EngineRequest]
    fails_at: Callable[[RequestId], int | None]
    published_cells: Callable[[int, BlockId], int]
    guess: Callable[[RequestId, int, int], int]
    contents_of: Callable[[RequestId, int], list[int]]
    settled_tokens: Callable[[RequestId], int]


@dataclass
class FakeDevice:
    """Executes plans in order."""

    layout: KvLayout
    num_slots: int
    budget_tokens: int
    vocab_tokens: int
    facts: Facts
    encoder_rows: int
    encoder_budget_rows: int
    drafts: bool = False
    slots: dict[Slot, DeviceSlot] = field(default_factory=dict)
    executed_steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """How often something happened that only the device sees."""

    def __post_init__(self) -> None:
        self.cells = Cells(self.layout, self._is_owned)
        self.loads = OpenLoads(self.cells)
        self.encoders = EncoderOutputs(self.encoder_rows, self.encoder_budget_rows)
        self._token_groups = [shape for shape in self.cells.shapes if shape.by_token]
        self._states = [shape.group for shape in self.cells.shapes if shape.kind == "recurrent"]
        self._cross = [shape.group for shape in self.cells.shapes if shape.kind == "cross"]

    def execute(self, plan: StepPlan) -> StepResult:
        """Do one step: bookkeeping, copies, then all writes, then all reads, as a layer does it, then saves."""
        demand(plan.step == self.executed_steps, f"plan {plan.step} executed as number {self.executed_steps}")
        self.executed_steps += 1
        for slot in plan.releases:
            demand(slot in self.slots, f"slot {slot} released but not in use")
            del self.slots[slot]
        for start in plan.starts:
            self._start(start)
            self.counts["slots reused in one plan"] += start.slot in plan.releases
        for append in plan.appends:
            self._append(append)
        for copy in plan.copies:
            targets = (self.slots[start.slot].tables[copy.group] for start in plan.starts)
            demand(any(copy.target in table for table in targets), f"{copy} is for nobody who starts")
        self._copy(plan.copies)
        self.encoders.step(plan, self.slots)
        for job in plan.loads:
            self.loads.begin(job, self.facts.contents_of(job.request_id, job.end_tokens))
        demand(plan.total_tokens <= self.budget_tokens, f"{plan.total_tokens} tokens planned in one step")
        busy = [*plan.decodes, *(row.slot for row in plan.rows)]
        demand(len(set(busy)) == len(busy), "a slot is computed twice in one step")
        self._check_rows(plan)
        decodes = [self._decode_row(slot) for slot in plan.decodes]
        guesses = [self._write(row) for row in decodes + plan.rows]
        answers = [
            self._read_and_sample(row, guessed) for row, guessed in zip(decodes + plan.rows, guesses, strict=True)
        ]
        made = {(group, self.slots[slot].tables[group][0]) for slot in busy for group in self._states}
        for save in plan.saves:
            demand((save.group, save.source) in made, f"{save} keeps a state that no row of this plan has made")
        self._copy(plan.saves)
        result = answers[: len(decodes)]
        return StepResult(
            plan.step,
            answers[len(decodes) :],
            [answer.token_ids[0] if answer.token_ids else 0 for answer in result],
            [(index, answer.error) for index, answer in enumerate(result) if answer.error is not None],
        )

    def _is_owned(self, group: int, block: BlockId) -> bool:
        shape = self.cells.shapes[group]
        in_table = any(
            # A worker is not told what was freed behind a window; it must not read there either.
            block in state.tables[group][shape.first_block(state.computed_tokens) :]
            for state in self.slots.values()
        )
        return in_table or self.loads.holds(group, block) or self.facts.published_cells(group, block) > 0

    def _start(self, start: SlotStart) -> None:
        demand(0 <= start.slot < self.num_slots, f"slot {start.slot} does not exist")
        demand(start.slot not in self.slots, f"slot {start.slot} is taken while in use")
        demand(start.computed_tokens < len(start.token_ids), "a start leaves nothing to compute")
        demand(len(start.blocks) == len(self.layout.groups), "a start has a table for every group")
        source = self.facts.source_of(start.request_id)
        same = (start.media, start.encoder_tokens, start.sampling) == (
            source.media,
            source.encoder_tokens,
            source.sampling,
        )
        demand(same, f"{start.request_id}: the start of its slot is not what was asked for")
        for group, table in enumerate(start.blocks):
            self._check_unique(start.request_id, table, group, start.computed_tokens)
        prefix = prefix_of(source)
        self.slots[start.slot] = DeviceSlot(
            start.request_id,
            source,
            prefix,
            list(start.token_ids),
            contents_of(start.token_ids, prefix),
            start.prompt_tokens,
            start.computed_tokens,
            [list(table) for table in start.blocks],
            start.sampling.prompt_logprobs is not None,
            self.facts.fails_at(start.request_id),
        )

    def _append(self, append: BlockAppend) -> None:
        demand(append.slot in self.slots, f"blocks appended to slot {append.slot}, which is free")
        state = self.slots[append.slot]
        for group, (table, blocks) in enumerate(zip(state.tables, append.blocks, strict=True)):
            if blocks:
                table.extend(blocks)
                demand(NULL_BLOCK not in blocks, f"{state.request_id} gets the null block")
                self._check_unique(state.request_id, table, group, state.computed_tokens)

    def _check_unique(self, request_id: RequestId, table: list[BlockId], group: int, computed_tokens: int) -> None:
        first = self.cells.shapes[group].first_block(computed_tokens)
        blocks = [block for block in table[first:] if block != NULL_BLOCK]
        demand(len(set(blocks)) == len(blocks), f"{request_id} has a block twice: {table}")

    def _copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            self._check_writable(copy.group, copy.target, 0)
            self.cells.copy(copy.group, copy.source, copy.target)

    def _check_writable(self, group: int, block: BlockId, first_cell: int) -> None:
        if first_cell < self.facts.published_cells(group, block):
            raise SimFault(f"cell {first_cell} of block {block} of group {group} is written, others may hit it")
        if self.loads.holds(group, block):
            raise SimFault(f"block {block} of group {group} is written while it is being loaded")

    def _check_rows(self, plan: StepPlan) -> None:
        """A decode that wants nothing else is no row: rows are for all others."""
        started = {start.slot for start in plan.starts}
        for row in plan.rows:
            if row.tokens == 1 and row.sample and row.slot not in started and row.slot in self.slots:
                plain = _is_plain(self.slots[row.slot].source) and not self.drafts
                demand(not plain or bool(self.slots[row.slot].source.media), f"{row} is a plain decode")

    def _decode_row(self, slot: Slot) -> PlanRow:
        demand(slot in self.slots, f"slot {slot} decodes but is free")
        state = self.slots[slot]
        demand(_is_plain(state.source), f"{state.request_id} decodes without what it asked for")
        return PlanRow(slot, state.request_id, state.computed_tokens, 1, True)

    def _write(self, row: PlanRow) -> list[int]:
        """Check a row and write its KV; return the drafts that the worker makes."""
        state = self.slots.get(row.slot)
        if state is None or state.request_id != row.request_id:
            raise SimFault(f"row for a slot of somebody else: {row}")
        demand(row.tokens >= 1 and row.start == state.computed_tokens, f"{row} at {state.computed_tokens} computed")
        end = row.start + row.tokens
        known = end - row.drafts
        demand(row.start < known <= len(state.token_ids), f"{row} computes what nobody knows: {len(state.token_ids)}")
        demand(row.sample == (known == len(state.token_ids)), f"{row} with {len(state.token_ids)} known tokens")
        demand(row.sample or not row.drafts, f"{row} guesses in the middle of a prompt")
        if row.sample and state.source.grammar is not None and not state.broken:
            self._check_gate(row, state)
        self.encoders.check_row(row, state.source.media, first=not state.begun)
        if not state.begun:
            self._begin(state)
        if row.sample and state.fails_at is not None and known - state.prompt_tokens >= state.fails_at:
            state.broken = True
        guesses = self._guess(row, state) if row.drafts else []
        contents = state.contents
        if guesses:
            contents = list(contents)
            state.prefix.extend(contents, [*state.token_ids, *guesses])
        self._write_cells(state, row.start, end, [VOID] * end if state.broken else contents)
        self._step_states(state, row.start, known)
        return guesses

    def _check_gate(self, row: PlanRow, state: DeviceSlot) -> None:
        demand(row.gated, f"{row.request_id} has a grammar and samples without waiting for it")
        outputs = len(state.token_ids) - state.prompt_tokens
        settled = self.facts.settled_tokens(row.request_id)
        demand(outputs == settled, f"{row.request_id} samples output {outputs}, its mask knows {settled} outputs")

    def _begin(self, state: DeviceSlot) -> None:
        """Compute what only the first row of a stay in a slot computes: keys and values of the encoder's output."""
        state.begun = True
        for group in self._cross:
            tokens = state.source.encoder_tokens
            self._check_room(state, group, tokens)
            root = encoder_content(state.source)
            self.cells.write(group, state.tables[group], 0, tokens, [hash((root, place)) for place in range(tokens)])

    def _guess(self, row: PlanRow, state: DeviceSlot) -> list[int]:
        """Make drafts; some of them are right."""
        guesses: list[int] = []
        contents = list(state.contents)
        for _ in range(row.drafts):
            right = self._sample(state, contents[-1], len(contents) - state.prompt_tokens)
            guesses.append(self.facts.guess(row.request_id, len(contents), right))
            state.prefix.extend(contents, [*state.token_ids, *guesses])
        return guesses

    def _check_room(self, state: DeviceSlot, group: int, tokens: int) -> None:
        if len(state.tables[group]) * self.cells.shapes[group].block_tokens < tokens:
            raise SimFault(f"{state.request_id}: group {group} has no block for position {tokens - 1}")

    def _write_cells(self, state: DeviceSlot, start: int, end: int, contents: list[int]) -> None:
        for shape in self._token_groups:
            group, table, size = shape.group, state.tables[shape.group], shape.block_tokens
            if len(table) * size < end:
                raise SimFault(f"{state.request_id}: group {group} has no block for position {end - 1}")
            for index in range(start // size, -(-end // size)):
                first = max(start - index * size, 0) // shape.ratio_tokens
                if first < shape.block_cells and self.facts.published_cells(group, table[index]) > first:
                    raise SimFault(
                        f"{state.request_id} writes position {max(start, index * size)} into block {table[index]} of "
                        f"group {group}, others may hit it"
                    )
                if table[index] == NULL_BLOCK:
                    raise SimFault(f"{state.request_id}: group {group} writes into the null block at {index * size}")
                if self.loads.open_jobs and self.loads.holds(group, table[index]):
                    raise SimFault(f"{state.request_id}: writes block {table[index]}, which is being loaded")
            self.cells.write(group, table, start, end, contents)

    def _step_states(self, state: DeviceSlot, start: int, end: int) -> None:
        """Read and overwrite recurrent states: one that is not exactly that of ``start`` is wrong."""
        for group in self._states:
            table = state.tables[group]
            demand(len(table) == 1 and table[0] != NULL_BLOCK, f"{state.request_id}: working states {table}")
            cells = self.cells.blocks[group].get(table[0])
            if start and not state.broken and (cells is None or cells[0] != state.contents[start - 1]):
                found = None if cells is None else self._position_of(cells[0], state)
                raise SimFault(
                    f"{state.request_id}: the state in block {table[0]} of group {group} is that {found}, not after "
                    f"{start} tokens"
                )
            self._check_writable(group, table[0], 0)
            self.cells.writable(group, table[0])[0] = VOID if state.broken else state.contents[end - 1]

    @staticmethod
    def _position_of(content: int, state: DeviceSlot) -> str:
        return f"after {state.contents.index(content) + 1} tokens" if content in state.contents else "of another prefix"

    def _read_and_sample(self, row: PlanRow, guesses: list[int]) -> RowResult:
        state = self.slots[row.slot]
        end = row.start + row.tokens
        if state.broken:
            state.computed_tokens = end - row.drafts
            if row.sample:
                state.add_tokens([0])
                return RowResult([], error="logits are not finite")
            return RowResult([])
        contents = state.contents
        if guesses:
            contents = list(contents)
            state.prefix.extend(contents, [*state.token_ids, *guesses])
        for shape in self._token_groups:
            self._check_reads(state, shape.group, shape.first_read(row.start), end, contents)
        for group in self._cross:
            root, tokens = encoder_content(state.source), state.source.encoder_tokens
            self._check_reads(state, group, 0, tokens, [hash((root, place)) for place in range(tokens)])
        entries = self._prompt_logprobs(state, row) if state.wants_prompt_logprobs else None
        state.computed_tokens = end - row.drafts
        if not row.sample:
            return RowResult([], prompt_logprobs=entries)
        first = len(state.token_ids)
        token_ids = self._accept(state, guesses)
        logprobs = None
        if state.source.sampling.logprobs is not None:
            logprobs = [TokenLogprobs(token, -float(first + i), 1, [], []) for i, token in enumerate(token_ids)]
        return RowResult(token_ids, logprobs=logprobs, prompt_logprobs=entries)

    def _check_reads(self, state: DeviceSlot, group: int, start: int, end: int, contents: list[int]) -> None:
        wrong = self.cells.wrong_cell(group, state.tables[group], start, end, contents)
        if wrong is not None:
            position, block, found, wanted = wrong
            raise SimFault(
                f"step {self.executed_steps - 1}: {state.request_id} reads position {position} of group {group} "
                f"({self.cells.shapes[group].kind}) in block {block}: {found} instead of {wanted}"
            )

    def _accept(self, state: DeviceSlot, guesses: list[int]) -> list[int]:
        """Sample, and go on as long as the drafts are what was sampled. KV behind the last right draft is void."""
        accepted: list[int] = []
        for guess in [*guesses, None]:
            outputs = len(state.token_ids) - state.prompt_tokens
            if accepted and state.fails_at is not None and outputs >= state.fails_at:
                break
            token_id = self._sample(state, state.contents[-1], outputs)
            state.add_tokens([token_id])
            accepted.append(token_id)
            if token_id != guess:
                break
        right = len(accepted) - 1
        state.computed_tokens += right
        self.counts["drafts accepted"] += right
        self.counts["drafts refused"] += len(guesses) - right
        return accepted

    def _sample(self, state: DeviceSlot, content: int, output_tokens: int) -> int:
        grammar = state.source.grammar
        allowed = None if grammar is None else allowed_tokens(grammar, output_tokens, self.vocab_tokens)
        return sample(content, self.vocab_tokens, allowed)

    def _prompt_logprobs(self, state: DeviceSlot, row: PlanRow) -> list[TokenLogprobs]:
        positions = range(row.start + 1, min(row.start + row.tokens + 1, state.prompt_tokens))
        return [TokenLogprobs(state.token_ids[position], -float(position), 1, [], []) for position in positions]


def _is_plain(source: EngineRequest) -> bool:
    """Return whether a request asks for nothing but tokens."""
    sampling = source.sampling
    return sampling.logprobs is None and sampling.prompt_logprobs is None and source.grammar is None

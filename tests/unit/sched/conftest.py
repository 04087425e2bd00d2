"""A scheduler with small limits, and a worker that answers with given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import pytest

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.sched.scheduler import Scheduler
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout, KvLayout
from headrace.types.events import AbortRequest, AddRequest, InboxEvent
from headrace.types.outputs import RequestDelta
from headrace.types.plans import StepPlan
from headrace.types.requests import EngineRequest
from headrace.types.results import RowResult, StepResult
from headrace.types.sampling import SamplingParams


class Bench:
    """Drives one scheduler by hand. Tokens count up from 1000, so that each is new."""

    def __init__(
        self,
        *,
        usable_blocks: int = 64,
        block_tokens: int = 4,
        max_model_len: int = 100,
        caching: bool = True,
        **config: object,
    ) -> None:
        layout = KvLayout([GroupLayout(0, FullAttentionSpec(1, 4, 4, 2), [0], block_tokens, usable_blocks + 1)])
        defaults: dict[str, object] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "watermark": 0.0}
        self.scheduler = Scheduler(
            SchedulerConfig(**(defaults | config)),
            layout=layout,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
        )
        self.inbox: list[InboxEvent] = []
        self.next_token = 1000
        self.now_s = 0.0

    @property
    def free_blocks(self) -> int:
        return self.scheduler.stats().blocks_free

    def add(self, name: str, prompt: int | Sequence[int] = 3, *, priority: int = 0, **fields: object) -> None:
        """Post a request; an int stands for a prompt of that many tokens that nobody else has."""
        prompt_ids = (
            [crc32(f"{name} {i}".encode()) % 900 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        )
        names = EngineRequest.__struct_fields__
        sampling = {key: value for key, value in fields.items() if key not in names}
        rest = {key: value for key, value in fields.items() if key in names}
        self.inbox.append(
            AddRequest(
                EngineRequest(
                    request_id=RequestId(name),
                    prompt_token_ids=prompt_ids,
                    sampling=SamplingParams(**({"max_tokens": 20, "seed": 0} | sampling)),
                    priority=priority,
                    **rest,
                )
            )
        )

    def abort(self, name: str) -> None:
        self.inbox.append(AbortRequest(RequestId(name)))

    def schedule(self) -> StepPlan:
        inbox, self.inbox = self.inbox, []
        return self.scheduler.schedule(inbox, self.now_s)

    def apply(self, plan: StepPlan, tokens: dict[str, int] | None = None, **answers: RowResult) -> list[RequestDelta]:
        """Answer a plan: each sampling row gets its token of ``tokens`` or a new one, or a whole given answer."""
        self.now_s += 1.0
        rows = []
        for row in plan.rows:
            self.next_token += 1
            token = (tokens or {}).get(row.request_id, self.next_token)
            rows.append(answers.get(row.request_id) or RowResult([token] if row.sample else []))
        return self.scheduler.apply(plan, StepResult(plan.step, rows), self.now_s)

    def step(self, tokens: dict[str, int] | None = None) -> tuple[StepPlan, list[RequestDelta]]:
        plan = self.schedule()
        return plan, self.apply(plan, tokens)

    def chunks(self, plan: StepPlan) -> dict[str, int]:
        """Return tokens planned per request, in plan order."""
        return {str(row.request_id): row.tokens for row in plan.rows}


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench

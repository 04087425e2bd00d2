"""A scheduler with small limits, and a worker that answers with given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import fixed_layout
from headrace.sched.scheduler import Scheduler
from headrace.types.cache_specs import FullAttentionSpec, KvLayout, LayerCache
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
        layout: KvLayout | None = None,
        options: dict[str, Any] | None = None,
        **config: object,
    ) -> None:
        """Make the scheduler.

        ``config`` are fields of `SchedulerConfig`, ``options`` further arguments of `Scheduler`; a layout replaces the
        one group of full attention.
        """
        layout = layout or fixed_layout(
            [LayerCache(0, FullAttentionSpec(1, 4, 4, 2))], block_tokens=block_tokens, usable_blocks=usable_blocks
        )
        defaults: dict[str, object] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "watermark": 0.0}
        self.scheduler = Scheduler(
            SchedulerConfig(**(defaults | config)),
            layout=layout,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
            **(options or {}),
        )
        self.inbox: list[InboxEvent] = []
        self.next_token = 1000
        self.now_s = 0.0
        self._decoding: dict[int, list[RequestId]] = {}

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

    def post(self, *events: InboxEvent) -> None:
        self.inbox.extend(events)

    def states(self) -> dict[str, str]:
        """Return the name of each request's state."""
        return {
            str(request.request_id): request.state.name
            for request in [*self.scheduler.running, *self.scheduler.waiting]
        }

    def drain(self, most_steps: int = 500) -> list[RequestDelta]:
        """Step until nothing is left to do and return all news."""
        news: list[RequestDelta] = []
        for _ in range(most_steps):
            if not self.scheduler.has_work and not self.inbox:
                return news
            news += self.step()[1]
        raise AssertionError(f"work is left after {most_steps} steps: {self.states()}")

    def schedule(self) -> StepPlan:
        inbox, self.inbox = self.inbox, []
        plan = self.scheduler.schedule(inbox, self.now_s)
        owners = {request.slot: request.request_id for request in self.scheduler.running}
        self._decoding[plan.step] = [owners[slot] for slot in plan.decodes]
        return plan

    def apply(self, plan: StepPlan, tokens: dict[str, int] | None = None, **answers: RowResult) -> list[RequestDelta]:
        """Answer a plan: what samples gets its token of ``tokens`` or a new one, or a whole given answer.

        Returns all news, those of the columns as deltas too.
        """
        self.now_s += 1.0
        decoding = self._decoding[plan.step]
        given = [answers.get(name) or RowResult([self._token(name, tokens)]) for name in decoding]
        rows = [
            answers.get(row.request_id) or RowResult([self._token(row.request_id, tokens)] if row.sample else [])
            for row in plan.rows
        ]
        sampled = [answer.token_ids[0] if answer.token_ids else 0 for answer in given]
        errors = [(index, answer.error) for index, answer in enumerate(given) if answer.error is not None]
        self.news = self.scheduler.apply(plan, StepResult(plan.step, rows, sampled, errors), self.now_s)
        return list(self.news.each())

    def _token(self, name: str, tokens: dict[str, int] | None) -> int:
        self.next_token += 1
        return (tokens or {}).get(name, self.next_token)

    def step(self, tokens: dict[str, int] | None = None) -> tuple[StepPlan, list[RequestDelta]]:
        plan = self.schedule()
        return plan, self.apply(plan, tokens)

    def chunks(self, plan: StepPlan) -> dict[str, int]:
        """Return tokens planned per request, decodes first, in plan order."""
        decodes = dict.fromkeys(map(str, self._decoding[plan.step]), 1)
        return decodes | {str(row.request_id): row.tokens for row in plan.rows}


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench

"""One request inside the scheduler: its state, its tokens, and how far it is computed.

Must not decide anything; the scheduler does.

The tokens of a running request, with one step in flight::

    0          computed_tokens        planned_tokens        known_tokens
    | KV applied      | KV in flight         | still to compute    |
                      (the last of the known tokens may be samples in flight: len(token_ids) <= known_tokens)
"""

from __future__ import annotations

import enum

from headrace.base.errors import invariant
from headrace.base.ids import RequestId, Slot
from headrace.kv.sequence import SequenceKv
from headrace.types.requests import EngineRequest
from headrace.types.token_ids import token_array


class RequestState(enum.Enum):
    """Where a request is. Only RUNNING owns a slot and blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.WAITING: (RequestState.RUNNING, RequestState.FINISHED),
    RequestState.RUNNING: (RequestState.PREEMPTED, RequestState.FINISHED),
    RequestState.PREEMPTED: (RequestState.RUNNING, RequestState.FINISHED),
    RequestState.FINISHED: (),
}


class Request:
    """Mutable record of a request.

    Attributes:
        source: what the front end sent.
        request_id: copied from there, for speed.
        order_key: requests with smaller keys go first and are preempted last.
        state: see `RequestState`; changed by `move_to`.
        slot: the worker's row while RUNNING, else None.
        kv: its block tables.
        token_ids: prompt and all output tokens whose results have been applied.
        prompt_tokens: length of the prompt.
        limit_tokens: prompt and output together never get longer.
        min_tokens: output tokens before a stop token counts.
        stop_token_ids: tokens that end it, EOS included unless ignored.
        known_tokens: ``len(token_ids)`` plus samples in flight.
        planned_tokens: tokens whose KV is computed once all plans so far have run.
        computed_tokens: tokens whose KV is computed by steps that have been applied.
        cached_tokens: length of the prefix hit at the first start, prompt only.
        preemptions: how often it lost its blocks.
        first_scheduled_s: when it first got a slot, or None.
        delta_sent: a delta has been made, so the next one need not say when it was first scheduled.
        plain: a decode of it asks for nothing but a token, so that it can go into the plan's columns.
        wants_prompt_logprobs: it may not use hits, because logits of all prompt positions are needed.
        prompt_logprobs_sent: how many prompt positions (from 1 on) have been delivered.
    """

    __slots__ = (
        "cached_tokens",
        "computed_tokens",
        "delta_sent",
        "first_scheduled_s",
        "known_tokens",
        "kv",
        "limit_tokens",
        "min_tokens",
        "order_key",
        "plain",
        "planned_tokens",
        "preemptions",
        "prompt_logprobs_sent",
        "prompt_tokens",
        "request_id",
        "slot",
        "source",
        "state",
        "stop_token_ids",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self, source: EngineRequest, *, order_key: tuple[int, float, int], limit_tokens: int, kv: SequenceKv
    ) -> None:
        sampling = source.sampling
        self.source = source
        self.request_id: RequestId = source.request_id
        self.order_key = order_key
        self.state = RequestState.WAITING
        self.slot: Slot | None = None
        self.kv = kv
        self.token_ids = token_array(source.prompt_token_ids)
        self.token_ids.extend(source.produced_token_ids)
        self.prompt_tokens = len(source.prompt_token_ids)
        self.limit_tokens = limit_tokens
        self.min_tokens = sampling.min_tokens
        eos = [] if sampling.ignore_eos else source.eos_token_ids
        self.stop_token_ids = frozenset([*eos, *sampling.stop_token_ids])
        self.known_tokens = len(self.token_ids)
        self.planned_tokens = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.first_scheduled_s: float | None = None
        self.delta_sent = False
        self.plain = sampling.logprobs is None and sampling.prompt_logprobs is None and source.grammar is None
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self.prompt_logprobs_sent = 0

    def move_to(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            InvariantError: there is no such transition.
        """
        invariant(state in _NEXT[self.state], f"request {self.request_id}: {self.state.value} -> {state.value}")
        self.state = state

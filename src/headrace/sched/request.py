"""One request inside the scheduler: its state, its tokens, and how far it is computed.

Must not decide anything; the passes of the scheduler do.

The tokens of a running request, with one step in flight::

    0          computed_tokens        planned_tokens        known_tokens
    | KV applied      | KV in flight         | still to compute    |
                      (the last of the known tokens may be samples in flight: len(token_ids) <= known_tokens)

A row with drafts in flight is the one exception: ``planned_tokens`` counts its drafts, so it lies beyond
``known_tokens`` until the result says how many of them hold. Nothing is left to compute then, so nobody plans it again.
"""

from __future__ import annotations

import enum

from headrace.base.errors import InvariantError
from headrace.base.ids import RequestId, Slot
from headrace.kv.sequence import SequenceKv
from headrace.types.requests import EngineRequest
from headrace.types.token_ids import token_array


class RequestState(enum.Enum):
    """Where a request is, and so what it owns.

    Only RUNNING owns a slot. RUNNING, LOADING and ARRIVED own blocks. WAITING and PREEMPTED stand in the queue and may
    start as soon as there is room; GRAMMAR, LEADER, QUOTA and LOOKUP are parked beside it until an event lets them in.
    """

    WAITING = "waiting"
    GRAMMAR = "waiting for its grammar"
    LEADER = "waiting for a request with the same prompt"
    QUOTA = "waiting for its tenant's quota"
    LOOKUP = "waiting for an outside store to answer"
    LOADING = "loading from an outside store"
    ARRIVED = "loaded, waiting for a slot"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


QUEUED = frozenset({RequestState.WAITING, RequestState.PREEMPTED})
"""States in the waiting queue."""
PARKED = frozenset({RequestState.GRAMMAR, RequestState.LEADER, RequestState.QUOTA, RequestState.LOOKUP})
"""States beside the queue: they may not start, however much room there is."""
REMOTE = frozenset({RequestState.LOADING, RequestState.ARRIVED})
"""States that own blocks without a slot."""

NEXT_STATES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: PARKED | {RequestState.LOADING, RequestState.RUNNING, RequestState.FINISHED},
    RequestState.GRAMMAR: frozenset({RequestState.LEADER, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.LEADER: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.QUOTA: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.LOOKUP: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    # A load that fails or takes too long sends the request back, without blocks.
    RequestState.LOADING: frozenset({RequestState.ARRIVED, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.ARRIVED: frozenset({RequestState.RUNNING, RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset(
        {
            RequestState.QUOTA,
            RequestState.LOOKUP,
            RequestState.LOADING,
            RequestState.RUNNING,
            RequestState.FINISHED,
        }
    ),
    RequestState.FINISHED: frozenset(),
}
"""Every transition there is."""


class Request:
    """Mutable record of a request.

    Attributes:
        source: what the front end sent.
        request_id: copied from there, for speed.
        order_key: requests with smaller keys go first; who needs memory takes it from larger ones.
        state: see `RequestState`; changed by `move_to`.
        slot: the worker's row while RUNNING, else None.
        kv: its block tables.
        token_ids: prompt and all output tokens whose results have been applied.
        prompt_tokens: length of the prompt.
        limit_tokens: prompt and output together never get longer.
        min_tokens: output tokens before a stop token counts.
        stop_token_ids: tokens that end it, EOS included unless ignored.
        known_tokens: ``len(token_ids)`` plus samples in flight (of a row with drafts: one).
        quiet_tokens: a decode with fewer known tokens needs no look at limit, blocks or checkpoints; 0 if it may.
        news_at_tokens: so many applied tokens bring news beyond a token; 0 while the first news are not sent.
        planned_tokens: tokens whose KV is computed once all plans so far have run.
        computed_tokens: tokens whose KV is computed by steps that have been applied.
        cached_tokens: prompt tokens that were there at the first start.
        preemptions: how often it lost its blocks.
        first_scheduled_s: when it first got a slot, or None.
        delta_sent: a delta has been made, so the next one need not say when it was first scheduled.
        gated: its samples are masked by a grammar.
        plain: a decode of it asks for nothing but a token **now**, so that it can go into the plan's columns.
        plain_decodes: `plain` once its media, if any, are behind it.
        wants_prompt_logprobs: it may not use hits, because logits of all prompt positions are needed.
        prompt_logprobs_sent: how many prompt positions (from 1 on) have been delivered.
    """

    __slots__ = (
        "cached_tokens",
        "computed_tokens",
        "delta_sent",
        "first_scheduled_s",
        "gated",
        "known_tokens",
        "kv",
        "limit_tokens",
        "min_tokens",
        "news_at_tokens",
        "order_key",
        "plain",
        "plain_decodes",
        "planned_tokens",
        "preemptions",
        "prompt_logprobs_sent",
        "prompt_tokens",
        "quiet_tokens",
        "request_id",
        "slot",
        "source",
        "state",
        "stop_token_ids",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        source: EngineRequest,
        *,
        order_key: tuple[float, int],
        limit_tokens: int,
        kv: SequenceKv,
        speculative: bool = False,
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
        self.quiet_tokens = 0
        self.news_at_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.first_scheduled_s: float | None = None
        self.delta_sent = False
        self.gated = source.grammar is not None
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self.plain_decodes = (
            sampling.logprobs is None and not self.wants_prompt_logprobs and not self.gated and not speculative
        )
        self.plain = self.plain_decodes and not source.media
        self.prompt_logprobs_sent = 0

    def move_to(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            InvariantError: there is no such transition.
        """
        # Not `invariant`: its message would be formatted each time.
        if state not in NEXT_STATES[self.state]:
            raise InvariantError(f"request {self.request_id}: {self.state.name} -> {state.name}")
        self.state = state

    def restart(self) -> None:
        """Forget all progress: the blocks are gone, or none were ever there.

        Mutates: the request.
        """
        self.planned_tokens = self.computed_tokens = self.quiet_tokens = 0
        self.plain = self.plain_decodes and not self.source.media

"""In place of the front end: what is known of each request from outside, and whether its news are what must come.

Must not look into the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.base.ids import RequestId
from headrace.sched.request import Request
from headrace.sim.cells import SimFault, demand
from headrace.sim.oracle import Expected, Prefix, contents_of, prefix_of
from headrace.types.events import AbortRequest, InboxEvent
from headrace.types.outputs import FinishReason, RequestDelta, StepNews
from headrace.types.requests import EngineRequest


@dataclass
class Record:
    """What is known of one request from outside.

    Attributes:
        source: what was sent last.
        expected: its output if nothing goes wrong.
        fails_at: output position at which its logits are not finite, or None.
        prefix: what its contents depend on.
        output_ids: tokens that have arrived.
        prompt_positions: positions whose log-probabilities have arrived in this life.
        finish: the last delta.
        aborted: the client is gone.
        abort_taken: the scheduler has read that.
        refusals_due: refusals of mistaken requests with the same id that are on their way.
        grammar_error: its grammar cannot be compiled.
    """

    source: EngineRequest
    expected: Expected
    fails_at: int | None = None
    prefix: Prefix = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    finish: RequestDelta | None = None
    aborted: bool = False
    abort_taken: bool = False
    refusals_due: int = 0
    grammar_error: bool = False

    def __post_init__(self) -> None:
        self.prefix = prefix_of(self.source)

    def contents(self, tokens: int) -> list[int]:
        """Return what belongs into the first positions."""
        return contents_of([*self.source.prompt_token_ids, *self.output_ids][:tokens], self.prefix)


_REFUSALS = frozenset(
    {"invalid_request", "context_length_exceeded", "kv_cache_too_small", "overloaded", "media_too_large"}
)
"""Codes of errors at the door: no token may have come before."""


class Observer:
    """Every request of a run, and the checks of its news.

    Attributes:
        records: by id.
        live: ids that the front end believes to be unfinished, in order.
        counts: how requests ended.
    """

    def __init__(self) -> None:
        self.records: dict[RequestId, Record] = {}
        self.live: dict[RequestId, None] = {}
        self.counts: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Begin to watch a request."""
        request_id = record.source.request_id
        demand(request_id not in self.records, "the simulation used an id twice")
        self.records[request_id] = record
        self.live[request_id] = None

    def abort(self, request_id: RequestId) -> None:
        """A client goes away."""
        self.records[request_id].aborted = True
        self.live.pop(request_id, None)

    def expect_refusal(self, request_id: RequestId) -> None:
        """A second request with this id was sent by mistake."""
        self.records[request_id].refusals_due += 1

    def taken(self, inbox: Sequence[InboxEvent]) -> None:
        """The scheduler has read these events."""
        for event in inbox:
            if isinstance(event, AbortRequest) and event.request_id in self.records:
                self.records[event.request_id].abort_taken = True

    def take(self, news: StepNews, *, now_s: float) -> None:
        """Check the news of a step."""
        deltas = [delta for delta in news.deltas if not self._is_mistake(delta)]
        named = [*news.request_ids, *(delta.request_id for delta in deltas)]
        if len(set(named)) != len(named):
            demand(False, f"a request has news in two places of one step: {sorted(named)}")
        for request_id, token_id in zip(news.request_ids, news.token_ids, strict=True):
            record = self._speak(request_id)
            demand(record.source.sampling.logprobs is None, f"{request_id}: a token without its log-probability")
            record.output_ids.append(token_id)
            self._check_output(record)
        for delta in deltas:
            refused = delta.error is not None and delta.error.code in _REFUSALS
            ended_before = delta.finish_reason is not None and not delta.new_token_ids
            record = self._speak(delta.request_id, at_the_door=refused or ended_before)
            self._check_logprobs(record, delta)
            record.output_ids += delta.new_token_ids
            self._check_output(record)
            record.prompt_positions += [round(-entry.logprob) for entry in delta.prompt_logprobs or []]
            if delta.finish_reason is not None:
                record.finish = delta
                self.live.pop(delta.request_id, None)
                self._check_finish(record, delta, now_s)

    def resubmit(self) -> list[Record]:
        """Make every unfinished request ready for a new core, with the tokens that have arrived.

        Returns:
            Their records, in order of arrival.
        """
        again: list[Record] = []
        for request_id in self.live:
            record = self.records[request_id]
            source = record.source
            leader_id = source.leader_id if source.leader_id in self.live else None
            record.source = msgspec.structs.replace(
                source, produced_token_ids=list(record.output_ids), leader_id=leader_id
            )
            if record.fails_at is not None:
                record.fails_at = max(record.fails_at, len(record.output_ids))
            record.prompt_positions = []
            record.refusals_due = 0
            again.append(record)
        return again

    @staticmethod
    def check_deadlines(at_work: Sequence[Request], now_s: float) -> None:
        """Nobody whose time is over is at work after a plan was made at ``now_s``."""
        for request in at_work:
            deadline_s = request.source.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                demand(False, f"{request.request_id} is at work at {now_s}, its deadline was {deadline_s}")

    def check_end(self) -> None:
        """Everybody has ended."""
        for request_id, record in self.records.items():
            demand(record.finish is not None or record.aborted, f"{request_id} never ended")

    def _is_mistake(self, delta: RequestDelta) -> bool:
        record = self.records[delta.request_id]
        if not record.refusals_due or delta.error is None or delta.error.code != "invalid_request":
            return False
        record.refusals_due -= 1
        self.counts["error id in use"] += 1
        return True

    def _speak(self, request_id: RequestId, *, at_the_door: bool = False) -> Record:
        record = self.records[request_id]
        demand(record.finish is None, f"{request_id}: news after the end")
        # An abort that is still in the inbox may be overtaken by news, one that was taken may not.
        late = record.abort_taken and not at_the_door
        demand(not late, f"{request_id}: news after the abort")
        return record

    @staticmethod
    def _check_output(record: Record) -> None:
        wanted = record.expected.output_ids
        if record.output_ids != wanted[: len(record.output_ids)]:
            raise SimFault(f"{record.source.request_id}: {record.output_ids} instead of {wanted}")

    @staticmethod
    def _check_logprobs(record: Record, delta: RequestDelta) -> None:
        """Each new token has its own entry, and nobody gets what was not asked for."""
        if record.source.sampling.logprobs is None:
            demand(delta.logprobs is None, f"{delta.request_id} gets log-probabilities that it did not ask for")
        elif delta.new_token_ids:
            first = len(record.source.prompt_token_ids) + len(record.output_ids)
            told = [(entry.token_id, -entry.logprob) for entry in delta.logprobs or []]
            wanted = [(token_id, float(first + index)) for index, token_id in enumerate(delta.new_token_ids)]
            demand(told == wanted, f"{delta.request_id} gets log-probabilities {told} for {wanted}")

    def _check_finish(self, record: Record, delta: RequestDelta, now_s: float) -> None:
        source = record.source
        if delta.finish_reason is FinishReason.ERROR:
            if delta.error is None:
                raise SimFault("an error without a record")
            self._check_error(record, delta.error.code, now_s)
            return
        expected = record.expected
        demand(record.fails_at is None or record.fails_at >= len(expected.output_ids), "a fault was not reported")
        done_before = source.produced_token_ids == expected.output_ids
        demand(done_before or not record.grammar_error, f"{source.request_id} has no grammar and runs")
        demand(record.output_ids == expected.output_ids, f"{source.request_id} ended early")
        same = (delta.finish_reason, delta.stop_token_id) == (expected.reason, expected.stop_token_id)
        demand(same, f"{source.request_id} ended by {delta.finish_reason}, {delta.stop_token_id}")
        self.counts[f"finish {expected.reason.text}"] += 1
        if not done_before and source.sampling.prompt_logprobs is not None:
            wanted = list(range(1, len(source.prompt_token_ids)))
            demand(record.prompt_positions == wanted, f"prompt log-probabilities of {record.prompt_positions}")
            demand(delta.cached_tokens == 0, "hits in spite of prompt log-probabilities")

    def _check_error(self, record: Record, code: str, now_s: float) -> None:
        self.counts[f"error {code}"] += 1
        source, outputs = record.source, len(record.output_ids)
        if code == "non_finite_logits":
            demand(record.fails_at == outputs, f"failed after {outputs} tokens, not {record.fails_at}")
        elif code == "request_timeout":
            due = source.deadline_s
            demand(due is not None and due <= now_s, f"{source.request_id} ended at {now_s} by a deadline of {due}")
        elif code in _REFUSALS:
            demand(outputs == len(source.produced_token_ids), f"{source.request_id} was refused after it had begun")
        else:
            demand(record.grammar_error, f"{source.request_id} ended by {code}")

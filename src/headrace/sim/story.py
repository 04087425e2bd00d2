"""The readable story of one run, line by line.

Must not look at anything but what it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from headrace.base.ids import RequestId
from headrace.kv.events import AllBlocksCleared, BlockStored, KvEvent
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.plans import StepPlan
from headrace.types.requests import EngineRequest


class Story:
    """Writes what happens, in the order in which it happens."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Begin.

        Args:
            write: takes one line.
        """
        self._write = write

    def line(self, text: str, step: int | None = None) -> None:
        """Write a line, with the number of the step that it is about, if any."""
        place = "" if step is None else f"step {step}"
        self._write(f"{place:<10}{text}")

    def posted(self, source: EngineRequest, fails_at: int | None) -> None:
        """A request was put into the inbox."""
        sampling = source.sampling
        facts = [f"prompt {source.prompt_token_ids}", f"max_tokens {sampling.max_tokens}"]
        if sampling.min_tokens:
            facts.append(f"min_tokens {sampling.min_tokens}")
        if source.priority:
            facts.append(f"priority {source.priority}")
        if source.cache_salt is not None:
            facts.append(f"salt {source.cache_salt!r}")
        if sampling.prompt_logprobs is not None:
            facts.append("prompt log-probabilities")
        if source.produced_token_ids:
            facts.append(f"resubmitted with output {source.produced_token_ids}")
        if fails_at is not None:
            facts.append(f"logits fail at output {fails_at}")
        self.line(f"post {source.request_id}: {', '.join(facts)}")

    def planned(self, plan: StepPlan, *, preempted: Sequence[RequestId], waiting: Sequence[RequestId]) -> None:
        """A step was planned.

        Args:
            plan: the plan.
            preempted: who lost slot and blocks for it.
            waiting: who waits after it.
        """
        rows = [
            f"{row.request_id}[{row.start}:{row.start + row.tokens}]{' samples' if row.sample else ''}"
            for row in plan.rows
        ]
        if plan.decodes:
            rows.insert(0, f"slots {plan.decodes} decode")
        self.line(f"plan: {', '.join(rows) or 'nothing to compute'}", plan.step)
        if preempted:
            self.line(f"  preempted: {', '.join(preempted)}")
        if plan.releases:
            self.line(f"  slots released: {', '.join(map(str, plan.releases))}")
        for start in plan.starts:
            hit = f", hit of {start.computed_tokens} tokens" if start.computed_tokens else ""
            tokens = len(start.token_ids)
            self.line(f"  {start.request_id} takes slot {start.slot}: {tokens} tokens, blocks {start.blocks}{hit}")
        for append in plan.appends:
            self.line(f"  slot {append.slot} gets blocks {append.blocks}")
        if waiting:
            self.line(f"  waiting: {', '.join(waiting)}")

    def cache_events(self, events: Sequence[KvEvent]) -> None:
        """Blocks were published, or evicted, or all forgotten."""
        stored: Counter[int] = Counter()
        removed: Counter[int] = Counter()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.line(f"  cache of group {event.group} is empty")
            else:
                (stored if isinstance(event, BlockStored) else removed)[event.group] += 1
        for verb, counts in (("evicted", removed), ("published", stored)):
            for group, blocks in sorted(counts.items()):
                self.line(f"  {verb}: {blocks} blocks of group {group}")

    def applied(self, step: int, deltas: Sequence[RequestDelta], dropped: Sequence[RequestId]) -> None:
        """The result of a step was settled.

        Args:
            step: its number.
            deltas: the news.
            dropped: owners of rows who had ended before.
        """
        self.line("apply", step)
        if dropped:
            self.line(f"  late rows dropped: {', '.join(dropped)}")
        for delta in deltas:
            news = [f"tokens {delta.new_token_ids}"] if delta.new_token_ids else []
            if delta.finish_reason is FinishReason.ERROR and delta.error is not None:
                news.append(f"ends with error {delta.error.code}")
            elif delta.finish_reason is not None:
                news.append(f"finishes by {delta.finish_reason.text}")
            if news:
                self.line(f"  {delta.request_id}: {', '.join(news)}")

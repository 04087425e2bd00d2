"""The readable story of one run, line by line.

Must not look at anything but what it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from headrace.base.ids import RequestId
from headrace.kv.events import AllBlocksCleared, BlockStored, KvEvent
from headrace.types.events import GrammarReady, InboxEvent, JobDone, LookupDone
from headrace.types.outputs import FinishReason, StepNews
from headrace.types.plans import PlanRow, StepPlan
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
        named: dict[str, object] = {
            "min_tokens": sampling.min_tokens,
            "priority": source.priority,
            "salt": source.cache_salt,
            "adapter": source.adapter,
            "tenant": source.tenant,
            "deadline": source.deadline_s,
            "encoder tokens": source.encoder_tokens,
            "grammar": source.grammar,
            "leader": source.leader_id,
        }
        facts += [f"{name} {value!r}" for name, value in named.items() if value]
        facts += [f"{span.identifier} at {span.start}" for span in source.media]
        facts += [f"embeddings at {span.start} to {span.start + span.tokens - 1}" for span in source.embeds]
        if sampling.prompt_logprobs is not None:
            facts.append("prompt log-probabilities")
        if source.produced_token_ids:
            facts.append(f"resubmitted with output {source.produced_token_ids}")
        if fails_at is not None:
            facts.append(f"logits fail at output {fails_at}")
        self.line(f"post {source.request_id}: {', '.join(facts)}")

    def arrived(self, event: InboxEvent) -> None:
        """Something came from outside."""
        if isinstance(event, GrammarReady):
            how = "cannot be compiled" if event.error else "is ready"
            self.line(f"the grammar of {event.request_id} {how}")
        elif isinstance(event, LookupDone):
            self.line(f"the store has an answer for {event.request_id}")
        elif isinstance(event, JobDone):
            self.line(f"job {event.job_id} reports: good up to {event.valid_tokens}")

    def planned(
        self, plan: StepPlan, decodes: Sequence[PlanRow], preempted: Sequence[RequestId], waiting: Sequence[RequestId]
    ) -> None:
        """A step was planned.

        Args:
            plan: the plan.
            decodes: its decodes as rows.
            preempted: who lost slot and blocks for it.
            waiting: who waits after it.
        """
        rows = [_row(row) for row in [*decodes, *plan.rows]]
        self.line(f"plan: {', '.join(rows) or 'nothing to compute'}", plan.step)
        if preempted:
            self.line(f"  preempted: {', '.join(preempted)}")
        if plan.releases:
            self.line(f"  slots released: {', '.join(map(str, plan.releases))}")
        for start in plan.starts:
            hit = f", begins at {start.computed_tokens}" if start.computed_tokens else ""
            tokens = len(start.token_ids)
            self.line(f"  {start.request_id} takes slot {start.slot}: {tokens} tokens, blocks {start.blocks}{hit}")
        for append in plan.appends:
            self.line(f"  slot {append.slot} gets blocks {append.blocks}")
        for verb, copies in (("copy", plan.copies), ("save", plan.saves)):
            for copy in copies:
                self.line(f"  {verb}: group {copy.group}, block {copy.source} to {copy.target}")
        if plan.encoder_frees:
            self.line(f"  encoder outputs dropped: {', '.join(plan.encoder_frees)}")
        for item in plan.encodes:
            self.line(f"  encode for {item.request_id}: {item.identifier}")
        for job in plan.loads:
            self.line(
                f"  job {job.job_id} loads {job.start_tokens} to {job.end_tokens} for {job.request_id} into "
                f"{job.blocks}"
            )
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

    def applied(self, step: int, news: StepNews, dropped: Sequence[RequestId]) -> None:
        """The result of a step was settled.

        Args:
            step: its number.
            news: of the scheduler.
            dropped: owners of rows who had ended before.
        """
        self.line("apply", step)
        if dropped:
            self.line(f"  late rows dropped: {', '.join(dropped)}")
        for request_id, token_id in zip(news.request_ids, news.token_ids, strict=True):
            self.line(f"  {request_id}: token {token_id}")
        for delta in news.deltas:
            told = [f"tokens {delta.new_token_ids}"] if delta.new_token_ids else []
            if delta.finish_reason is FinishReason.ERROR and delta.error is not None:
                told.append(f"ends with error {delta.error.code}")
            elif delta.finish_reason is not None:
                told.append(f"finishes by {delta.finish_reason.text}")
            if told:
                self.line(f"  {delta.request_id}: {', '.join(told)}")


def _row(row: PlanRow) -> str:
    drafts = f" with {row.drafts} drafts" if row.drafts else ""
    sampling = (" samples behind a gate" if row.gated else " samples") if row.sample else ""
    return f"{row.request_id}[{row.start}:{row.start + row.tokens}]{drafts}{sampling}"

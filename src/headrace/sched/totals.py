"""Running totals of the scheduler. Plain counters; must not know a metrics library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Totals:
    """Counts since the start; units are in the names.

    Attributes:
        prefix_query_tokens: known tokens of requests that looked for a hit at their first start.
        prefix_hit_tokens: those that were there, in blocks or loaded.
        preemptions: requests that lost their blocks.
        prompt_tokens: prompt tokens of requests that have started.
        generation_tokens: sampled tokens applied.
        step_tokens: tokens computed in the last applied step.
        step_s: seconds from planning to applying that step.
        quota_skips: how often a request was passed over because of its tenant's quota.
        timeouts: requests ended by their deadline.
        checkpoints: copies of recurrent states planned for the prefix cache.
        draft_tokens: drafts whose results have been applied.
        accepted_tokens: those that held.
    """

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    step_s: float = 0.0
    quota_skips: int = 0
    timeouts: int = 0
    checkpoints: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def started(self, prompt_tokens: int, known_tokens: int, hit_tokens: int) -> None:
        """Count the first start of a request."""
        self.prompt_tokens += prompt_tokens
        self.prefix_query_tokens += known_tokens
        self.prefix_hit_tokens += hit_tokens

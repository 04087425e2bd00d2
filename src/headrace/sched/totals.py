"""Running totals of the scheduler. Plain counters; must not know a metrics library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Totals:
    """Counts since the start; units are in the names.

    Attributes:
        prefix_query_tokens: known tokens of requests that looked for a hit at their first start.
        prefix_hit_tokens: those that were found.
        preemptions: requests that lost their blocks.
        prompt_tokens: prompt tokens of requests that have started.
        generation_tokens: sampled tokens applied.
        step_tokens: tokens computed in the last applied step.
        step_s: seconds from planning to applying that step.
    """

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    step_s: float = 0.0

    def started(self, prompt_tokens: int, known_tokens: int, hit_tokens: int) -> None:
        """Count the first start of a request."""
        self.prompt_tokens += prompt_tokens
        self.prefix_query_tokens += known_tokens
        self.prefix_hit_tokens += hit_tokens

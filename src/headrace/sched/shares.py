"""How much of a step one prompt may take while others have prompt tokens to compute too.

The rule: a prompt is **long** while it lacks more than two whole prefill budgets (what a step has left after its
decodes). A long prompt takes at most an equal share of that budget, one for each request that computes a prompt and one
for all that wait together; every other prompt takes what it needs, in order. What is left over in the end goes to the
long ones, the oldest first. So short prompts are served in order as fast as they can, a long one neither holds them up
nor stops, and no token of the budget is left unused. Must not know requests.
"""

from __future__ import annotations

LONG_BUDGETS = 2


class PrefillBudget:
    """What the prompts of one step share.

    Attributes:
        tokens: the budget of the step after its decodes.
        share_tokens: most tokens that a long prompt takes at first; at least 1.
    """

    __slots__ = ("share_tokens", "tokens")

    def __init__(self, tokens: int, *, prefilling: int, others_wait: bool) -> None:
        """Divide a budget.

        Args:
            tokens: the budget of the step after its decodes.
            prefilling: requests that compute a prompt, the asking one included.
            others_wait: whether others wait for a slot that they could have.
        """
        self.tokens = tokens
        self.share_tokens = max(1, tokens // max(1, prefilling + others_wait))

    def is_long(self, todo_tokens: int) -> bool:
        """Return whether a prompt that lacks so many tokens is long."""
        return todo_tokens > LONG_BUDGETS * self.tokens

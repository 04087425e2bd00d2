"""When a request is finished by what it has produced. Stop strings are the front end's; they arrive as aborts.

Must not change a request.
"""

from __future__ import annotations

from headrace.sched.request import Request
from headrace.types.outputs import FinishReason


def finish_of(request: Request) -> tuple[FinishReason, int | None] | None:
    """Judge a request by its last output token.

    The order is: EOS and stop tokens (from ``min_tokens`` outputs on), then length.

    Args:
        request: with at least one output token.

    Returns:
        The reason and the token that stopped it, if a token did; None if it goes on.
    """
    token_ids = request.token_ids
    last = token_ids[-1]
    if last in request.stop_token_ids and len(token_ids) - request.prompt_tokens >= request.min_tokens:
        return FinishReason.STOP, last
    if len(token_ids) >= request.limit_tokens:
        return FinishReason.LENGTH, None
    return None

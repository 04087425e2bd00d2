"""Text to tokens off the event loop where it could take long. Must not know any endpoint."""

from __future__ import annotations

import asyncio

from headrace.serve.context import ServeState

_INLINE_CHARS = 20_000
"""Below this, encoding takes a few milliseconds at most and a thread would cost more than it saves."""


async def encode(state: ServeState, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text."""
    tokenizer = state.engine.tokenizer
    if len(text) <= _INLINE_CHARS:
        return list(tokenizer.encode(text, add_special_tokens))
    return list(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens))

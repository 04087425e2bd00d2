"""What the engine hands out: chunks for streaming, whole results for the offline class. Plain data."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FinishText: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class TokenEntry:
    """Log-probability of one token and of its likeliest rivals.

    Attributes:
        token_id: the token that stands there.
        text: its text, by itself (a part of a character shows as U+FFFD).
        bytes: its exact bytes.
        logprob: natural logarithm of its probability under the raw model distribution.
        rank: 1 for the likeliest.
        top: (token id, text, bytes, logprob) of the likeliest tokens, best first.
    """

    token_id: int
    text: str
    bytes: builtins.bytes
    logprob: float
    rank: int
    top: list[tuple[int, str, builtins.bytes, float]]


@dataclass(slots=True)
class OutputChunk:
    """News of one output sequence.

    Attributes:
        index: which of the n sequences.
        text: new text that can no longer change or be cut.
        token_ids: new tokens.
        logprobs: entries of these tokens, if asked for.
        finish_reason: set on the last chunk of an index, exactly once.
        stop_reason: the stop token id or stop string that ended it; None for end of sequence and length.
        prompt_token_ids: the prompt, on the first chunk of an index only.
        prompt_logprobs: one entry for each prompt token (None for the first), on the first chunk only, if asked for.
        cached_tokens: prompt tokens that came from the prefix cache.
        queued_s: seconds from arrival to the first step, on the first chunk only.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenEntry] | None = None
    finish_reason: FinishText | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenEntry | None] | None = None
    cached_tokens: int = 0
    queued_s: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished sequence.

    Attributes:
        index: which of the n sequences.
        text: the whole output.
        token_ids: its tokens, up to and with the one that ended it.
        cumulative_logprob: sum of the tokens' log-probabilities, if they were asked for.
        logprobs: one entry for each token, if asked for.
        finish_reason: why it ended.
        stop_reason: the stop token id or stop string that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenEntry] | None = None
    finish_reason: FinishText | None = None
    stop_reason: int | str | None = None

    def add(self, chunk: OutputChunk) -> None:
        """Append a chunk of this index."""
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *chunk.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(entry.logprob for entry in chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """Result of one prompt.

    Attributes:
        request_id: id of the request.
        prompt: its text, or None if it was given as token ids.
        prompt_token_ids: its tokens.
        outputs: n finished sequences, by index.
        prompt_logprobs: one entry for each prompt token (None for the first), if asked for.
        num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenEntry | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True once every sequence has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def add(self, chunk: OutputChunk) -> None:
        """Append a chunk of any index."""
        self.outputs[chunk.index].add(chunk)
        if chunk.index == 0:
            self.num_cached_tokens = chunk.cached_tokens
            if chunk.prompt_logprobs is not None:
                self.prompt_logprobs = chunk.prompt_logprobs

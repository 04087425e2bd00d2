"""What must come out: the content of every KV position, every sampled token, the whole output of a request.

A pure function of the request. It must not know batches, blocks, steps or the scheduler: that is the point of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types.outputs import FinishReason
from headrace.types.requests import EngineRequest

ROOT_CONTENT = 0x48656164


def next_content(before: int, token_id: int) -> int:
    """Return the KV content of a position: it depends on the whole prefix, as attention makes it depend."""
    return hash((before, token_id))  # hashes of integers are the same in every process


def contents_of(token_ids: list[int]) -> list[int]:
    """Return the KV content of each position."""
    contents: list[int] = []
    content = ROOT_CONTENT
    for token_id in token_ids:
        content = next_content(content, token_id)
        contents.append(content)
    return contents


def sample(content: int, vocab_tokens: int) -> int:
    """Return the token that follows a prefix, from the content of its last position."""
    return (content >> 9) % vocab_tokens


@dataclass(frozen=True)
class Expected:
    """The output of a request that runs alone and undisturbed."""

    output_ids: list[int]
    reason: FinishReason
    stop_token_id: int | None


def expected_output(source: EngineRequest, *, vocab_tokens: int, max_model_len: int) -> Expected:
    """Run a request on paper. ``produced_token_ids`` are not used: a later life must continue the same output."""
    sampling = source.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(source.eos_token_ids))
    content = contents_of(source.prompt_token_ids)[-1] if source.prompt_token_ids else ROOT_CONTENT
    output: list[int] = []
    while True:
        token_id = sample(content, vocab_tokens)
        content = next_content(content, token_id)
        output.append(token_id)
        if token_id in stops and len(output) >= sampling.min_tokens:
            return Expected(output, FinishReason.STOP, token_id)
        full = len(source.prompt_token_ids) + len(output) >= max_model_len
        if full or (sampling.max_tokens is not None and len(output) >= sampling.max_tokens):
            return Expected(output, FinishReason.LENGTH, None)

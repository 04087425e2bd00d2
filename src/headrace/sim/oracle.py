"""What must come out: the content of every KV position, every sampled token, the whole output of a request.

A pure function of the request. It must not know batches, blocks, steps or the scheduler: that is the point of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.types.outputs import FinishReason
from headrace.types.requests import EngineRequest, MediaSpan

ROOT_CONTENT = 0x48656164
"""Content before the first position, and of a recurrent state that has seen nothing."""

VOID = -1
"""Content that no prefix has: never written, overwritten by somebody else, or computed from a wrong guess."""


def number_of(kind: str, value: str | bytes) -> int:
    """Return the same number for an extra key in every process; ``kind`` keeps equal values of two kinds apart."""
    data = value.encode() if isinstance(value, str) else value
    return zlib.crc32(data, zlib.crc32(kind.encode()))


def next_content(before: int, token_id: int) -> int:
    """Return the KV content of a position: it depends on the whole prefix, as attention makes it depend."""
    return hash((before, token_id))  # hashes of integers are the same in every process


def media_name(number: int, tokens: int, rows: int) -> str:
    """Return an identifier that says how many positions the item fills: equal items must be equal everywhere."""
    return f"item {number} of {tokens} tokens, {rows} rows"


def span_tokens(value: str | bytes) -> int:
    """Return the positions that an item fills, from a name of `media_name` or `embeds_digest`."""
    text = value if isinstance(value, str) else value.decode()
    return int(text.split(" of ")[1].split(" ")[0])


def embeds_digest(number: int, tokens: int) -> bytes:
    """Return a digest of embeddings, in the same spirit."""
    return f"embeds {number} of {tokens} tokens".encode()


def span_mark(kind: str, value: str | bytes, offset_tokens: int) -> int:
    """Return what an item contributes to the content of one of its positions."""
    return hash((number_of(kind, value), offset_tokens))


def encoder_content(source: EngineRequest) -> int:
    """Return what cross attention reads: the name of the encoder's input, or the request itself if it has no name."""
    names = [span.identifier for span in source.media if not span.tokens]
    return number_of("encoder", names[0]) if names else number_of("nameless", source.request_id)


def root_content(salt: str | None, adapter: bytes | None, encoder: int | None) -> int:
    """Return the content before position 0: everything on which the whole sequence depends.

    Args:
        salt: tenants' contents differ, so that one of them can never read another's unnoticed.
        adapter: digest.
        encoder: see `encoder_content`; None without an encoder.
    """
    if salt is None and adapter is None and encoder is None:
        return ROOT_CONTENT
    salt_number = -2 if salt is None else number_of("salt", salt)
    adapter_number = -2 if adapter is None else number_of("adapter", adapter)
    return hash((ROOT_CONTENT, salt_number, adapter_number, -2 if encoder is None else encoder))


def marks_of(source: EngineRequest) -> dict[int, int]:
    """Return position -> number for the positions that media or embeddings fill."""
    marks: dict[int, int] = {}
    for span in source.media:
        for offset in range(span.tokens):
            marks[span.start + offset] = span_mark("media", span.identifier, offset)
    for embeds in source.embeds:
        for offset in range(embeds.tokens):
            position = embeds.start + offset
            marks[position] = hash((marks.get(position, 0), span_mark("embeds", embeds.digest, offset)))
    return marks


@dataclass(frozen=True)
class Prefix:
    """What the content of a request's positions depends on beside its tokens.

    Attributes:
        root: content before position 0.
        marks: of positions filled by media or embeddings.
    """

    root: int
    marks: Mapping[int, int]

    def extend(self, contents: list[int], token_ids: Sequence[int]) -> None:
        """Append the contents of the tokens that ``contents`` does not cover yet."""
        content = contents[-1] if contents else self.root
        marks = self.marks
        for position in range(len(contents), len(token_ids)):
            token_id = token_ids[position]
            content = hash((content, hash((token_id, marks[position])) if position in marks else token_id))
            contents.append(content)


def prefix_of(source: EngineRequest) -> Prefix:
    """Return what the KV of a request depends on beside its tokens."""
    encoder = encoder_content(source) if source.encoder_tokens else None
    return Prefix(root_content(source.cache_salt, source.adapter, encoder), marks_of(source))


def contents_of(token_ids: Sequence[int], prefix: Prefix) -> list[int]:
    """Return the KV content of each position."""
    contents: list[int] = []
    prefix.extend(contents, token_ids)
    return contents


def sample(content: int, vocab_tokens: int, allowed: Sequence[int] | None = None) -> int:
    """Return the token that follows a prefix.

    Args:
        content: of the prefix's last position.
        vocab_tokens: number of tokens.
        allowed: what a grammar admits here; None for all.
    """
    if allowed is not None:
        return allowed[(content >> 9) % len(allowed)]
    return (content >> 9) % vocab_tokens


def allowed_tokens(grammar: str, output_tokens: int, vocab_tokens: int) -> list[int]:
    """Return what a grammar admits after so many output tokens: all but one token, another one at each place."""
    forbidden = (number_of("grammar", grammar) + output_tokens) % vocab_tokens
    return [token_id for token_id in range(vocab_tokens) if token_id != forbidden]


def media_in(media: Sequence[MediaSpan], start: int, end: int) -> list[str]:
    """Return the identifiers of the items that fill some position in ``[start, end)``."""
    return [span.identifier for span in media if span.tokens and span.start < end and span.start + span.tokens > start]


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
    prefix = prefix_of(source)
    content = contents_of(source.prompt_token_ids, prefix)[-1] if source.prompt_token_ids else prefix.root
    output: list[int] = []
    while True:
        allowed = None
        if source.grammar is not None:
            allowed = allowed_tokens(source.grammar, len(output), vocab_tokens)
        token_id = sample(content, vocab_tokens, allowed)
        content = next_content(content, token_id)
        output.append(token_id)
        if token_id in stops and len(output) >= sampling.min_tokens:
            return Expected(output, FinishReason.STOP, token_id)
        full = len(source.prompt_token_ids) + len(output) >= max_model_len
        if full or (sampling.max_tokens is not None and len(output) >= sampling.max_tokens):
            return Expected(output, FinishReason.LENGTH, None)

"""What the front end sends to the engine core for one request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.ids import RequestId
from headrace.types.sampling import SamplingParams


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Prompt positions that the output of an encoder fills (an image, say).

    Attributes:
        identifier: names the content, processing included; equal identifiers mean equal encoder outputs.
        start: first prompt position.
        tokens: positions.
        rows: rows of the encoder's output; the unit of the encoder cache and of its budget.
    """

    identifier: str
    start: int
    tokens: int
    rows: int


class EmbedsSpan(msgspec.Struct, frozen=True, array_like=True):
    """Prompt positions whose embeddings come with the request in place of token ids.

    Attributes:
        digest: of the embeddings' bytes.
        start: first prompt position.
        tokens: positions.
    """

    digest: bytes
    start: int
    tokens: int


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate. A request with n > 1 is n of these.

    Attributes:
        request_id: unique in the life of the front end; never reused.
        prompt_token_ids: at least one token; a list, or an array of `types.token_ids`. Bytes only on the wire.
        sampling: ``n`` is 1 and ``seed`` is set here.
        eos_token_ids: tokens that end the output unless ``ignore_eos``.
        arrival_s: monotonic seconds at arrival.
        priority: smaller runs earlier (priority policy only).
        cache_salt: separates prefix-cache entries of different tenants.
        block_hashes: prefix hashes of the prompt's full blocks, from ``kv.prefix_hash`` (may be shorter or empty:
            the core computes what is missing).
        bad_words_token_ids: token sequences of ``sampling.bad_words``.
        produced_token_ids: output tokens of an earlier life of this request (resubmission after a core crash). They
            count as output: towards max_tokens, penalties and seeds.
        deadline_s: monotonic seconds at which it is ended with `RequestTimeoutError`, or None.
        tenant: whose quota it counts towards, or None.
        adapter: digest of the adapter's content, or None for the base model.
        media: spans of the prompt that encoder outputs fill, in order, not overlapping.
        embeds: spans of the prompt with embeddings of their own, in order, not overlapping.
        encoder_tokens: length of the encoder's output for cross attention.
        grammar: compiled elsewhere; the request waits until `GrammarReady` and its rows are gated. None without.
        leader_id: an earlier request with the same prompt (``n > 1``): this one waits until that has computed it.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int] | bytes
    sampling: SamplingParams
    eos_token_ids: list[int] = []
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    block_hashes: list[bytes] = []
    bad_words_token_ids: list[list[int]] = []
    produced_token_ids: list[int] = []
    deadline_s: float | None = None
    tenant: str | None = None
    adapter: bytes | None = None
    media: list[MediaSpan] = []
    embeds: list[EmbedsSpan] = []
    encoder_tokens: int = 0
    grammar: str | None = None
    leader_id: RequestId | None = None

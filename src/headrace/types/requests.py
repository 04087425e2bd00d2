"""What the front end sends to the engine core for one request."""

from __future__ import annotations

import msgspec

from headrace.base.ids import RequestId
from headrace.types.sampling import SamplingParams


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate. A request with n > 1 is n of these.

    Attributes:
        request_id: unique in the life of the front end; never reused.
        prompt_token_ids: at least one token.
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
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int] = []
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    block_hashes: list[bytes] = []
    bad_words_token_ids: list[list[int]] = []
    produced_token_ids: list[int] = []

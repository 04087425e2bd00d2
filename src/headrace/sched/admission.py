"""Which requests are refused at the door, with the numbers that say why.

Must not change anything: the scheduler turns the error into the request's only delta.
"""

from __future__ import annotations

from array import array

from headrace.base.errors import ContextLengthError, NeverFitsError, RequestError
from headrace.kv.prefix_hash import HASH_BYTES, MAX_TOKEN_ID
from headrace.types.cache_specs import KvLayout
from headrace.types.requests import EngineRequest
from headrace.types.token_ids import token_array


def limit_tokens(source: EngineRequest, max_model_len: int) -> int:
    """Return the length in tokens, prompt included, at which the request ends at the latest."""
    if source.sampling.max_tokens is None:
        return max_model_len
    return min(max_model_len, len(source.prompt_token_ids) + source.sampling.max_tokens)


def check_request(
    source: EngineRequest, *, layout: KvLayout, capacity_tokens: int, max_model_len: int, hash_tokens: int
) -> None:
    """Refuse a request that can never run to its end.

    Args:
        source: the request.
        layout: blocks of the KV cache.
        capacity_tokens: of the layout: length of the longest sequence that fits.
        max_model_len: longest prompt + output in tokens.
        hash_tokens: tokens under one prefix hash.

    Raises:
        RequestError: an empty prompt, a token id out of range, or prefix hashes that do not belong to the prompt.
        ContextLengthError: no room for a single output token.
        NeverFitsError: more KV than the whole cache.
    """
    prompt_tokens = len(source.prompt_token_ids)
    if not prompt_tokens:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    _check_token_ids(source)
    if prompt_tokens + 1 > max_model_len:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens and the model's length is {max_model_len} tokens, prompt and "
            f"output together: shorten the prompt to at most {max_model_len - 1} tokens",
            param="prompt",
        )
    hashes = source.block_hashes
    # Both ends stand for all: a long prompt has thousands, and a wrong one in between is never found.
    ends = (*hashes[:1], *hashes[-1:])
    if len(hashes) > prompt_tokens // hash_tokens or any(len(end) != HASH_BYTES for end in ends):
        raise RequestError(
            f"{len(hashes)} prefix hashes do not belong to {prompt_tokens} prompt tokens of {hash_tokens} a hash",
            param="block_hashes",
        )
    # The last token is sampled but never computed, so it needs no room.
    longest_tokens = limit_tokens(source, max_model_len) - 1
    if longest_tokens > capacity_tokens:
        raise NeverFitsError(_never_fits(source, layout, longest_tokens), param="max_tokens")


def _check_token_ids(source: EngineRequest) -> None:
    try:
        # An array that came over the wire cannot hold anything else.
        if not isinstance(source.prompt_token_ids, array):
            token_array(source.prompt_token_ids)
        token_array(source.produced_token_ids)
    except (OverflowError, TypeError):
        raise RequestError(f"a token id is outside 0..{MAX_TOKEN_ID}", param="prompt") from None


def _never_fits(source: EngineRequest, layout: KvLayout, longest_tokens: int) -> str:
    tightest = min(layout.groups, key=lambda group: (group.num_blocks - 1) * group.block_tokens)
    needed_blocks = -(-longest_tokens // tightest.block_tokens)
    return (
        f"the request may need KV for {longest_tokens} tokens ({len(source.prompt_token_ids)} of them prompt), which "
        f"is {needed_blocks} blocks of {tightest.block_tokens} tokens; the whole cache has "
        f"{tightest.num_blocks - 1} blocks: lower max_tokens or shorten the prompt, or start the engine with a larger "
        f"--kv-cache-memory-bytes"
    )

"""Which requests are refused at the door, with the numbers that say why.

Must not change anything: the scheduler turns the error into the request's only delta.
"""

from __future__ import annotations

import functools
from array import array

from headrace.base.errors import ContextLengthError, NeverFitsError, NotImplementedFeatureError, RequestError
from headrace.kv.budget import capacity_tokens, group_need_blocks
from headrace.kv.prefix_hash import HASH_BYTES, MAX_TOKEN_ID
from headrace.sched.encoding import EncoderGate
from headrace.types.cache_specs import KvLayout
from headrace.types.requests import EngineRequest
from headrace.types.token_ids import token_array


class Limits:
    """What a request may ask for at most; fixed for the life of the engine."""

    def __init__(
        self, layout: KvLayout, *, max_model_len: int, hash_tokens: int, batch_tokens: int, in_flight: int
    ) -> None:
        """Note the sizes.

        Args:
            layout: of the KV memory.
            max_model_len: longest prompt + output in tokens.
            hash_tokens: tokens under one prefix hash.
            batch_tokens: most tokens of one sequence in one step.
            in_flight: plans made before the first result is applied.
        """
        self.layout = layout
        self.max_model_len = max_model_len
        self.hash_tokens = hash_tokens
        self.batch_tokens = batch_tokens
        self.in_flight = in_flight
        self.capacity_tokens = functools.lru_cache(maxsize=64)(self._capacity_tokens)

    def check_media(self, source: EngineRequest, encoder: EncoderGate | None) -> None:
        """Refuse media that can never run.

        Raises:
            NotImplementedFeatureError: the engine has no encoder.
            HeadraceError: as `EncoderGate.check`.
        """
        if encoder is None:
            raise NotImplementedFeatureError(
                "this engine runs no encoder, so a prompt cannot have media items: leave them out", param="media"
            )
        encoder.check(source.media, len(source.prompt_token_ids))

    def _capacity_tokens(self, encoder_tokens: int) -> int:
        return capacity_tokens(
            self.layout, batch_tokens=self.batch_tokens, in_flight=self.in_flight, encoder_tokens=encoder_tokens
        )


def limit_tokens(source: EngineRequest, max_model_len: int) -> int:
    """Return the length in tokens, prompt included, at which the request ends at the latest."""
    if source.sampling.max_tokens is None:
        return max_model_len
    return min(max_model_len, len(source.prompt_token_ids) + source.sampling.max_tokens)


def check_request(source: EngineRequest, limits: Limits) -> None:
    """Refuse a request that can never run to its end.

    Args:
        source: the request.
        limits: of the engine.

    Raises:
        RequestError: an empty prompt, a token id out of range, or prefix hashes that do not belong to the prompt.
        ContextLengthError: no room for a single output token.
        NeverFitsError: more KV than the whole cache.
    """
    prompt_tokens = len(source.prompt_token_ids)
    if not prompt_tokens:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    _check_token_ids(source)
    if prompt_tokens + 1 > limits.max_model_len:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens and the model's length is {limits.max_model_len} tokens, prompt "
            f"and output together: shorten the prompt to at most {limits.max_model_len - 1} tokens",
            param="prompt",
        )
    hashes, hash_tokens = source.block_hashes, limits.hash_tokens
    # Both ends stand for all: a long prompt has thousands, and a wrong one in between is never found.
    ends = (*hashes[:1], *hashes[-1:])
    if len(hashes) > prompt_tokens // hash_tokens or any(len(end) != HASH_BYTES for end in ends):
        raise RequestError(
            f"{len(hashes)} prefix hashes do not belong to {prompt_tokens} prompt tokens of {hash_tokens} a hash",
            param="block_hashes",
        )
    # The last token is sampled but never computed, so it needs no room.
    longest_tokens = limit_tokens(source, limits.max_model_len) - 1
    if longest_tokens > limits.capacity_tokens(source.encoder_tokens):
        raise NeverFitsError(_never_fits(source, limits, longest_tokens), param="max_tokens")


def _check_token_ids(source: EngineRequest) -> None:
    try:
        # An array that came over the wire cannot hold anything else.
        if not isinstance(source.prompt_token_ids, array):
            token_array(source.prompt_token_ids)
        token_array(source.produced_token_ids)
    except (OverflowError, TypeError):
        raise RequestError(f"a token id is outside 0..{MAX_TOKEN_ID}", param="prompt") from None


def _never_fits(source: EngineRequest, limits: Limits, longest_tokens: int) -> str:
    needs = []
    for group in limits.layout.groups:
        blocks = group_need_blocks(
            group,
            longest_tokens,
            batch_tokens=limits.batch_tokens,
            in_flight=limits.in_flight,
            encoder_tokens=source.encoder_tokens,
        )
        size = f"blocks of {group.block_tokens} tokens" if group.block_tokens else "states"
        needs.append(f"{blocks} {size} where the whole cache has at most {group.num_blocks - 1}")
    return (
        f"the request may need KV for {longest_tokens} tokens ({len(source.prompt_token_ids)} of them prompt), which "
        f"is {' and '.join(needs)}; the longest that fits is {limits.capacity_tokens(source.encoder_tokens)} tokens: "
        "lower max_tokens or shorten the prompt, or start the engine with a larger --kv-cache-memory-bytes"
    )

"""From a prompt and sampling parameters to checked engine requests. Shared by the server and the offline class.

Everything that a user can get wrong is refused here with a typed error, before the core hears of it. Must not know
sockets or asyncio; `process` is plain CPU work that may run in a thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ContextLengthError, NeverFitsError, RequestError
from headrace.base.ids import RequestId
from headrace.kv.prefix_hash import HashExtras, block_hashes, root_of
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams, is_unicode
from headrace.types.wire import CoreReady

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

_SEED_BITS = 63
_SEED_MASK = (1 << _SEED_BITS) - 1
SHORT_TEXT_CHARS = 4096
"""Text up to this length is tokenised in well under a millisecond, so it may be done on an event loop."""


@dataclass(frozen=True)
class ProcessedPrompt:
    """One prompt, checked.

    Attributes:
        text: the prompt as text, or None if it was given as token ids.
        token_ids: its tokens.
        sampling: the parameters, with ``max_tokens`` filled in.
        requests: n engine requests, by index.
    """

    text: str | None
    token_ids: list[int]
    sampling: SamplingParams
    requests: list[EngineRequest]


class InputProcessor:
    """Checks prompts against the facts of the core.

    Args:
        tokenizer: the model's, or None if it has none; then only token ids are taken.
        ready: facts of the core.
        eos_token_ids: tokens that end an output.
        hash_seed: start of the prefix hashes, the same as in the core.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, ready: CoreReady, eos_token_ids: Iterable[int], *, hash_seed: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._ready = ready
        self._eos_token_ids = sorted(token_id for token_id in set(eos_token_ids) if token_id < ready.vocab_tokens)
        self._hash_root = root_of(hash_seed)
        self._token_bytes_max: int | None = None

    def process(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        tenant: str | None = None,
        deadline_s: float | None = None,
    ) -> ProcessedPrompt:
        """Tokenise, check, and make one engine request for each of the ``n`` outputs.

        Args:
            prompt: text or token ids.
            sampling: the user's parameters.
            request_id: unique; the n requests get ids derived from it.
            arrival_s: monotonic seconds.
            priority: smaller runs earlier.
            cache_salt: separates prefix-cache entries of different tenants.
            add_special_tokens: let the tokenizer add what the model expects at the beginning.
            tenant: whose quota the requests count towards.
            deadline_s: monotonic seconds at which they end with an error.

        Raises:
            RequestError: anything wrong with the prompt or the parameters; the message has the numbers.
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenize(prompt, add_special_tokens) if isinstance(prompt, str) else self._checked_ids(prompt)
        self._check_ids_in_sampling(sampling)
        sampling = self._fit_length(len(token_ids), sampling)
        bad_words = self._bad_words(sampling.bad_words)
        if cache_salt is not None and not (isinstance(cache_salt, str) and is_unicode(cache_salt)):
            raise RequestError("cache_salt must be a string of valid Unicode (no lone surrogates)", param="cache_salt")
        # One implementation of the hash serves both ends.
        hashes = block_hashes(
            token_ids, self._ready.hash_tokens, extras=HashExtras(salt=cache_salt), root=self._hash_root
        )
        seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        ids = [RequestId(request_id if sampling.n == 1 else f"{request_id}:{index}") for index in range(sampling.n)]
        # The first one computes the prompt, the others then hit it; with prompt log-probabilities nobody may hit.
        leader_id = ids[0] if sampling.prompt_logprobs is None else None
        requests = [
            EngineRequest(
                request_id=ids[index],
                prompt_token_ids=token_ids,
                sampling=sampling.replace(n=1, seed=(seed + index) & _SEED_MASK),
                eos_token_ids=self._eos_token_ids,
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                block_hashes=hashes,
                bad_words_token_ids=bad_words,
                deadline_s=deadline_s,
                tenant=tenant,
                leader_id=leader_id if index else None,
            )
            for index in range(sampling.n)
        ]
        return ProcessedPrompt(text, token_ids, sampling, requests)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text that can fit into the model.

        Raises:
            ContextLengthError: so long that it cannot fit however it is cut; found out without tokenising it.
            RequestError: not encodable, or the model has no tokenizer.
        """
        tokenizer = self._require_tokenizer("a text prompt")
        limit = self._ready.max_model_len * self._longest_token_bytes(tokenizer)
        # A character is at least a byte, so the cheap test comes first.
        if len(text) > limit or _utf8_bytes(text) > limit:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, more than {self._ready.max_model_len} tokens of this model "
                "can hold; shorten it",
                param="prompt",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @staticmethod
    def is_quick(prompt: str | Sequence[int], sampling: SamplingParams) -> bool:
        """True if `process` takes so little time that an event loop may wait for it."""
        ids = len(sampling.logit_bias or ()) + len(sampling.allowed_token_ids or ()) + len(sampling.stop_token_ids)
        return len(prompt) + ids + sum(len(word) for word in sampling.bad_words) <= SHORT_TEXT_CHARS

    def prepare(self) -> None:
        """Do the slow one-time work (longest token of the vocabulary) ahead of the first prompt."""
        if self._tokenizer is not None:
            self._longest_token_bytes(self._tokenizer)

    def _longest_token_bytes(self, tokenizer: Tokenizer) -> int:
        if self._token_bytes_max is None:
            self._token_bytes_max = max(
                1, max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_tokens))
            )
        return self._token_bytes_max

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this model has none; send token ids, or give one with --tokenizer",
                param="prompt",
            )
        return self._tokenizer

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        self._check_prompt_length(len(token_ids))  # before millions of ids are looked at
        return self._in_vocabulary(token_ids, "prompt", "the prompt")

    def _in_vocabulary(self, token_ids: Iterable[int], param: str, what: str) -> list[int]:
        vocab = self._ready.vocab_tokens
        result = [token_id if type(token_id) is int else _plain_int(token_id) for token_id in token_ids]
        for token_id in result:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab:
                raise RequestError(
                    f"{what} has {token_id!r}, which is no token id of this model (0 to {vocab - 1})", param=param
                )
        return result

    def _check_ids_in_sampling(self, sampling: SamplingParams) -> None:
        self._in_vocabulary(sampling.stop_token_ids, "stop_token_ids", "stop_token_ids")
        self._in_vocabulary(sampling.logit_bias or (), "logit_bias", "logit_bias")
        self._in_vocabulary(sampling.allowed_token_ids or (), "allowed_token_ids", "allowed_token_ids")
        if sampling.detokenize and self._tokenizer is None and sampling.stop:
            self._require_tokenizer("a stop string")

    def _fit_length(self, prompt_tokens: int, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with ``max_tokens`` set, or refuse what cannot be reached."""
        self._check_prompt_length(prompt_tokens)
        longest = self._ready.max_model_len
        room = longest - prompt_tokens
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if wanted > room:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, together {prompt_tokens + wanted}, "
                f"but the model's length is {longest}: lower max_tokens to at most {room}",
                param="max_tokens",
            )
        if sampling.min_tokens > wanted:
            raise ContextLengthError(
                f"min_tokens is {sampling.min_tokens}, but after the prompt there is room for {wanted}",
                param="min_tokens",
            )
        self._check_fits(prompt_tokens + wanted)
        return sampling if sampling.max_tokens is not None else sampling.replace(max_tokens=wanted)

    def _check_prompt_length(self, prompt_tokens: int) -> None:
        longest = self._ready.max_model_len
        if prompt_tokens == 0:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        if prompt_tokens >= longest:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens, but prompt and output together may have {longest}: shorten "
                f"the prompt to at most {longest - 1} tokens",
                param="prompt",
            )

    def _check_fits(self, tokens: int) -> None:
        # The last token is sampled and never computed, so it has no KV.
        if tokens - 1 > self._ready.capacity_tokens:
            raise NeverFitsError(
                f"prompt and output of {tokens} tokens need KV for {tokens - 1}, but the whole cache holds "
                f"{self._ready.capacity_tokens} tokens of one sequence: lower max_tokens, or start the engine with a "
                "larger --kv-cache-memory-bytes",
                param="max_tokens",
            )

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences of texts that must not appear: at the beginning of a word and inside one."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            tokenizer = self._require_tokenizer("bad_words")
            for form in (word.lstrip() or word, " " + word.lstrip()):
                if ids := tokenizer.encode(form, add_special_tokens=False):
                    sequences[tuple(ids)] = None
        return [list(sequence) for sequence in sequences]


def _plain_int(value: Any) -> Any:
    """Return the Python integer of numpy's integers, which the wire does not know; other values as they are."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _utf8_bytes(text: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: {error.reason} at character {error.start}", param="prompt"
        ) from error

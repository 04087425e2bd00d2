"""Sampling parameters of one request. Validated here, used by the sampler, the scheduler and the front end."""

from __future__ import annotations

import msgspec

from headrace.base.errors import RequestError

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_N = 128
MAX_INT = 2**31 - 1
"""Largest count or token id; the worker keeps them in 32 bits."""
MAX_SEED = 2**63 - 1
_MAX_BIAS = 1e30


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose the tokens of one request.

    Attributes:
        n: completions for one prompt.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens below this fraction of the likeliest token's probability, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output; > 0.
        presence_penalty: subtracted once from the logit of each token of the output, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        logit_bias: token id -> value added to its logit.
        allowed_token_ids: if given, no other token can be sampled.
        bad_words: texts that must not appear; the front end turns them into token sequences.
        max_tokens: largest number of output tokens; None means up to the model's length.
        min_tokens: no EOS or stop token before this many output tokens.
        stop: texts that end the output (not included unless ``include_stop_str_in_output``).
        stop_token_ids: token ids that end the output.
        ignore_eos: do not stop at the model's end-of-sequence token.
        seed: makes the output reproducible; None lets the front end draw one.
        logprobs: number of alternatives returned for each output token; 0 returns only the chosen one.
        prompt_logprobs: the same for the prompt.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted without effect: only slow tokenizers put such spaces, and none is used.
        include_stop_str_in_output: keep the stop text in the output.
        detokenize: False returns token ids only.

    Raises:
        RequestError: a value out of its range; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_lengths(self)
        _check_token_lists(self)
        _check_texts(self)
        for name in _FLAGS:
            _require(isinstance(getattr(self, name), bool), name, "must be true or false", getattr(self, name))

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature == 0.0

    def replace(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields changed, validated again.

        Args:
            **changes: field name and new value.

        Raises:
            RequestError: a value out of its range.
        """
        return msgspec.structs.replace(self, **changes)


_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
)


def _check_numbers(params: SamplingParams) -> None:
    _integer("n", params.n, 1, MAX_N)
    _number("temperature", params.temperature, 0.0, 100.0)
    _integer("top_k", params.top_k, -1, MAX_INT)
    _number("top_p", params.top_p, 0.0, 1.0)
    _require(params.top_p > 0.0, "top_p", "must be in (0, 1]", params.top_p)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("repetition_penalty", params.repetition_penalty, 0.0, 1e6)
    _require(params.repetition_penalty > 0.0, "repetition_penalty", "must be above 0", params.repetition_penalty)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if params.seed is not None:
        _integer("seed", params.seed, -MAX_SEED - 1, MAX_SEED)
    if params.logprobs is not None:
        _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.prompt_logprobs is not None:
        _integer("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)


def _check_lengths(params: SamplingParams) -> None:
    _integer("min_tokens", params.min_tokens, 0, MAX_INT)
    if params.max_tokens is None:
        return
    _integer("max_tokens", params.max_tokens, 1, MAX_INT)
    rule = f"must not be above max_tokens={params.max_tokens}"
    _require(params.min_tokens <= params.max_tokens, "min_tokens", rule, params.min_tokens)


def _check_token_lists(params: SamplingParams) -> None:
    _list_of("stop_token_ids", params.stop_token_ids, int)
    for token_id in params.stop_token_ids:
        _integer("stop_token_ids", token_id, 0, MAX_INT)
    if params.allowed_token_ids is not None:
        _list_of("allowed_token_ids", params.allowed_token_ids, int)
        _require(len(params.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty", [])
        for token_id in params.allowed_token_ids:
            _integer("allowed_token_ids", token_id, 0, MAX_INT)
    if params.logit_bias is not None:
        _require(isinstance(params.logit_bias, dict), "logit_bias", "must map token ids to numbers", params.logit_bias)
        for token_id, bias in params.logit_bias.items():
            _require(isinstance(token_id, int), "logit_bias", "keys must be token ids", token_id)
            _integer("logit_bias", token_id, 0, MAX_INT)
            finite = _is_number(bias) and -_MAX_BIAS <= bias <= _MAX_BIAS
            _require(finite, "logit_bias", f"bias of token {token_id} must be a finite number", bias)


def _check_texts(params: SamplingParams) -> None:
    _list_of("stop", params.stop, str)
    _require(
        len(params.stop) <= MAX_STOP_STRINGS, "stop", f"must have at most {MAX_STOP_STRINGS} strings", len(params.stop)
    )
    _require(all(params.stop), "stop", "must not have an empty string, which ends every output at once", params.stop)
    _list_of("bad_words", params.bad_words, str)
    _require(
        all(params.bad_words), "bad_words", "must not have an empty string, which is in every text", params.bad_words
    )
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        _require(all(map(is_unicode, texts)), name, "must be valid Unicode (no lone surrogates)", texts)
    if params.stop and params.detokenize is False:
        raise RequestError("stop strings need detokenize=True", param="stop")


def is_unicode(text: str) -> bool:
    """Return False if a text has a lone surrogate: it has no UTF-8 form, so it can be neither sent nor tokenised."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise RequestError(f"{name} {rule}, got {_short(value)}", param=name)


def _short(value: object) -> str:
    # A user can send megabytes; an error message stays readable. Ids as huge as 10**5000 have no decimal text at all.
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 100 else text[:97] + "..."


def _is_number(value: object) -> bool:
    # True is an int to Python, never to a user.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {_short(value)}", param=name)
    _require(low <= value <= high, name, f"must be in [{low}, {high}]", value)


def _number(name: str, value: float, low: float, high: float) -> None:
    _require(_is_number(value), name, "must be a number", value)
    _require(low <= value <= high, name, f"must be in [{low:g}, {high:g}]", value)


def _list_of(name: str, value: object, kind: type) -> None:
    fits = isinstance(value, list) and all(isinstance(item, kind) for item in value)
    _require(fits, name, f"must be a list of {kind.__name__}", value)

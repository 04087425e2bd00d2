"""Sampling parameters of one request. Validated here, used by the sampler, the scheduler and the front end."""

from __future__ import annotations

import math

import msgspec

from headrace.base.errors import RequestError

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_N = 128


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose the tokens of one request.

    Args:
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
        spaces_between_special_tokens: put spaces between special tokens (slow tokenizers only).
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
        _require(1 <= self.n <= MAX_N, "n", f"must be in [1, {MAX_N}]", self.n)
        _finite("temperature", self.temperature, 0.0, 100.0)
        _require(self.top_k >= -1, "top_k", "must be -1, 0 (both: off) or positive", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]", self.top_p)
        _finite("min_p", self.min_p, 0.0, 1.0)
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0,
            "repetition_penalty",
            "must be above 0",
            self.repetition_penalty,
        )
        _finite("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _finite("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative", self.min_tokens)
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens, "min_tokens", f"must not be above max_tokens={self.max_tokens}", self.min_tokens
            )
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _require(0 <= value <= MAX_LOGPROBS, name, f"must be in [0, {MAX_LOGPROBS}]", value)
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _require(all(self.stop), "stop", "an empty string stops before the first token", self.stop)
        _require(all(self.bad_words), "bad_words", "an empty string is in every text", self.bad_words)
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty", [])
        if self.logit_bias is not None:
            for token_id, bias in self.logit_bias.items():
                _require(math.isfinite(bias), "logit_bias", f"bias of token {token_id} must be finite", bias)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature == 0.0

    def replace(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise RequestError(f"{name} {rule}, got {value}", param=name)


def _finite(name: str, value: float, low: float, high: float) -> None:
    _require(math.isfinite(value) and low <= value <= high, name, f"must be in [{low:g}, {high:g}]", value)

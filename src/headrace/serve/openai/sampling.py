"""From request fields to `SamplingParams`: what the request says, then the model's default, then the neutral value.

Ranges are checked by `SamplingParams` itself; here only what the API alone knows. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import RequestError
from headrace.serve.openai.schema_common import SamplingFields
from headrace.types.sampling import SamplingParams

_SAME_NAME = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_MAX_BIAS = 100.0
_COMPLETION_TOKENS = 16


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Build the sampling parameters of a request.

    Args:
        body: the request.
        defaults: the model's sampling defaults, by field name.
        max_tokens: most output tokens; None is up to the model's length.
        logprobs: alternatives for each output token, or None.
        prompt_logprobs: alternatives for each prompt token, or None.

    Raises:
        RequestError: a value out of its range; ``param`` names the field.
    """
    values: dict[str, Any] = {}
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[name] = value
    return SamplingParams(
        **values,
        logit_bias=_logit_bias(body.logit_bias),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def completion_max_tokens(body: SamplingFields, defaults: Mapping[str, Any]) -> int:
    """Return the output limit of the classic endpoint, whose neutral value is 16.

    Raises:
        RequestError: below 1.
    """
    if body.max_tokens is not None:
        return _at_least_one("max_tokens", body.max_tokens)
    default = defaults.get("max_tokens")
    return int(default) if default is not None else _COMPLETION_TOKENS


def chat_max_tokens(body: SamplingFields, newer: int | None, defaults: Mapping[str, Any]) -> int | None:
    """Return the output limit of a chat: ``max_completion_tokens`` beats ``max_tokens``; None: the model's length.

    Raises:
        RequestError: below 1.
    """
    if newer is not None:
        return _at_least_one("max_completion_tokens", newer)
    if body.max_tokens is not None:
        return _at_least_one("max_tokens", body.max_tokens)
    default = defaults.get("max_tokens")
    return int(default) if default is not None else None


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise RequestError(
            f"{name} must be at least 1, got {value}; to score a prompt use echo with logprobs and 1 token", param=name
        )
    return value


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias: keys are token ids, got {key[:60]!r}", param="logit_bias")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise RequestError(f"logit_bias of token {key} must be in [-100, 100], got {bias:g}", param="logit_bias")
        biases[int(key)] = bias
    return biases

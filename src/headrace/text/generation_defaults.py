"""Sampling defaults that a model brings in generation_config.json.

As in vLLM, ``do_sample`` is ignored: whether to sample is said by the temperature. Must not apply them to a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import ModelSourceError, RequestError
from headrace.types.sampling import SamplingParams

_FIELDS: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_new_tokens": ("max_tokens", int),
}
"""Key of generation_config.json -> (field of `SamplingParams`, type)."""


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for which the model has a default.

    Args:
        generation_config: parsed JSON; unknown keys and nulls are skipped.

    Raises:
        ModelSourceError: a value is out of its range.
    """
    found: dict[str, Any] = {}
    for key, (name, kind) in _FIELDS.items():
        value = generation_config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelSourceError(f"generation_config.json: {key} must be a number, got {value!r}", param=key)
        found[name] = kind(value)
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelSourceError(
            f"generation_config.json: {error.message}; --generation-config none ignores the file", param=error.param
        ) from error
    return found

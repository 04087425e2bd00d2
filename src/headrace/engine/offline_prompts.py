"""The forms in which the offline class takes prompts, conversations and sampling parameters, and their checks.

Whatever a caller hands over ends as plain Python lists, texts and integers, or in a `RequestError` that says what was
expected. Must not tokenise, and must not import numpy or torch: their arrays are known by ``tolist``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from headrace.base.errors import RequestError
from headrace.types.sampling import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a string, a mapping or a list of integers is one prompt.

    Raises:
        RequestError: neither a prompt nor a list.
    """
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    listed = _listed(prompts, "prompts")
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def text_or_ids(prompt: Prompt) -> tuple[str | list[int], str | None]:
    """Return (text or token ids, cache salt) of one prompt.

    Raises:
        RequestError: not a prompt, or a mapping with unknown or missing keys.
    """
    if not isinstance(prompt, Mapping):
        return _content(prompt), None
    unknown = set(prompt) - set(_KEYS)
    if unknown:
        raise RequestError(f"unknown prompt keys {sorted(map(str, unknown))}; known: {', '.join(_KEYS)}")
    content = prompt.get("prompt_token_ids")
    if content is None:
        content = prompt.get("prompt")
    if content is None:
        raise RequestError("a prompt mapping needs prompt or prompt_token_ids", param="prompt")
    return _content(content), prompt.get("cache_salt")


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[list[Mapping[str, Any]]]:
    """Return a list of conversations; a list of mappings is one conversation.

    Raises:
        RequestError: something in it is no conversation, or a message has no role.
    """
    listed = _listed(messages, "messages")
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for number, conversation in enumerate(conversations):
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise RequestError(
                f"conversation {number} must be a list of messages, got {type(conversation).__name__}", param="messages"
            )
        for position, message in enumerate(conversation):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"conversation {number}: message {position} must be a mapping with a role and a content",
                    param="messages",
                )
    return [list(conversation) for conversation in conversations]


def sampling_for(
    prompts: Sequence[Prompt],
    given: SamplingParams | Sequence[SamplingParams] | None,
    default: Callable[[], SamplingParams],
) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt.

    Args:
        prompts: in the caller's order.
        given: for all prompts, one for each, or None.
        default: makes the parameters for None.

    Raises:
        RequestError: not sampling parameters, or not one for each prompt.
    """
    if given is None:
        return [default()] * len(prompts)
    if isinstance(given, SamplingParams):
        return [given] * len(prompts)
    listed: list[Any] = [given] if isinstance(given, str | Mapping) else _listed(given, "sampling_params")
    for one in listed:
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, got {type(one).__name__}",
                param="sampling_params",
            )
    if len(listed) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(listed)} sampling parameters", param="sampling_params")
    return listed


def _content(content: Any) -> str | list[int]:
    if isinstance(content, str):
        return content
    if isinstance(content, bytes | Mapping) or not (isinstance(content, Sequence) or hasattr(content, "tolist")):
        raise RequestError(f"a prompt is a text or a list of token ids, got {type(content).__name__}", param="prompt")
    return _listed(content, "prompt")


def _listed(values: Any, name: str) -> list[Any]:
    """Return the items of a list, an iterator, or an array (as Python numbers)."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)

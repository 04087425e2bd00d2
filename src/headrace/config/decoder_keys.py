"""Typed access to the keys of a ``config.json``: a value of another kind is refused by the name of its key.

Pure. Must not know an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from headrace.base.errors import UnsupportedModelError


def is_number(value: Any, kind: type[Any]) -> bool:
    """Return whether a value is of a numeric kind. True is no number."""
    # Asked with Integral and Real, since numbers from GGUF metadata may be numpy's.
    return isinstance(value, kind) and not isinstance(value, bool)


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer.

    Args:
        config: parsed JSON.
        key: to read.
        default: for a key that is missing or null; without one it must be there.

    Raises:
        UnsupportedModelError: missing, or another value.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key}", param=key)
    if not is_number(value, Integral) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} must be a positive integer, got {value!r}", param=key)
    return int(value)


def switch(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return a boolean; missing and null are the default.

    Raises:
        UnsupportedModelError: another value.
    """
    value = config.get(key)
    if value is None:
        return default
    # numpy's bool comes from GGUF metadata; a text such as "false" would count as true.
    if not isinstance(value, bool) and type(value).__name__ != "bool":
        raise UnsupportedModelError(f"config.json: {key} must be true or false, got {value!r}", param=key)
    return bool(value)


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number; see `count`.

    Raises:
        UnsupportedModelError: missing, or another value.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key}", param=key)
    if not is_number(value, Real) or not 0 < value < 1e30:
        raise UnsupportedModelError(f"config.json: {key} must be a positive number, got {value!r}", param=key)
    return float(value)


def positive_or_none(config: Mapping[str, Any], key: str) -> float | None:
    """Return a positive number, or None where the key is missing or null.

    Raises:
        UnsupportedModelError: another value.
    """
    return None if config.get(key) is None else positive(config, key)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return one token id or a list of them as a tuple; empty where the key is missing or null.

    Raises:
        UnsupportedModelError: another value.
    """
    value = config.get(key)
    items = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in items:
        if not is_number(item, Integral) or item < 0:
            raise UnsupportedModelError(f"config.json: {key} must be a token id, got {item!r}", param=key)
    return tuple(int(item) for item in items)


def layer_list(config: Mapping[str, Any], key: str) -> list[Any] | None:
    """Return a list, or None where the key is missing or null.

    Raises:
        UnsupportedModelError: another value.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise UnsupportedModelError(f"config.json: {key} must be a list, got {value!r}", param=key)
    return list(value)

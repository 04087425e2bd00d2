"""Limits on what a chat template may make, and the checks that enforce them.

The sizes bound memory; they also bound the time that one operation can spend in C code, where no exception can end it.
Must not know templates or messages.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_TEXT_CHARS = 16 << 20
"""Longest text that a template, or any value in it, may become."""
MAX_ITEMS = 200_000
"""Most nodes of a structure that a template makes or prints."""
MAX_TOTAL_CHARS = 1 << 29
"""All text and eight times all items that one render may look at or make: it bounds what can be kept."""
MAX_INT_BITS = 4096
MAX_WIDTH = 10_000
"""Largest width, indent, precision or count given to a filter or string method."""

_WIDE_PERCENT = re.compile(r"\d{5,}|\*")
_WIDE_BRACES = re.compile(r"\d{5,}|\{[^{}]*\{")
_ITEM_CHARS = 8


class _Spent(threading.local):
    """What the render in this thread has used up."""

    characters = 0


_spent = _Spent()


def reset_spent() -> None:
    """Begin a new render in this thread."""
    _spent.characters = 0


def check_characters(count: int) -> None:
    """Account for a text of ``count`` characters before it is made.

    Raises:
        SecurityError: above the limit for one text or for all.
    """
    if count > MAX_TEXT_CHARS:
        raise SecurityError(f"a text of more than {MAX_TEXT_CHARS} characters")
    _spend(count)


def check_items(count: int) -> None:
    """Account for a structure of ``count`` items.

    Raises:
        SecurityError: above the limit for one structure or for all.
    """
    if count > MAX_ITEMS:
        raise SecurityError(f"a list of more than {MAX_ITEMS} items")
    _spend(count * _ITEM_CHARS)


def _spend(characters: int) -> None:
    _spent.characters += characters
    if _spent.characters > MAX_TOTAL_CHARS:
        raise SecurityError(f"texts of more than {MAX_TOTAL_CHARS} characters together")


def measured(value: Any) -> Any:
    """Return ``value`` if it stays within the limits: the length of a text, the nodes of a structure.

    Raises:
        SecurityError: too large.
    """
    if isinstance(value, str):
        check_characters(len(value))
    elif isinstance(value, list | tuple | dict | set | frozenset | Namespace):
        _measure_structure(value)
    return value


def _measure_structure(value: Any) -> None:
    items, characters = 0, 0
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        items += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, Namespace):
            pending.append(item._Namespace__attrs)
        if items + len(pending) > MAX_ITEMS:
            check_items(items + len(pending))
    check_items(items)
    check_characters(characters)


def join_checked(parts: Iterable[str]) -> str:
    """Join texts; like ``"".join``, but refuses before it allocates."""
    pieces = parts if isinstance(parts, list | tuple) else list(parts)
    check_characters(sum(map(len, pieces)))
    return "".join(pieces)


def check_widths(arguments: Iterable[Any]) -> None:
    """Refuse a width, indent, precision or count above the limit."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_WIDTH:
            raise SecurityError(f"a width or count of {argument} is above {MAX_WIDTH}")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse ``left operator right`` if the result would be too large; knows ``+ * ** %``."""
    if operator == "%":
        if isinstance(left, str):
            check_percent(left, right)
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            check_characters(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            check_items(len(left) + len(right))
    else:
        _check_product(operator, left, right)


def _check_product(operator: str, left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(sequence, str | bytes):
            check_characters(len(sequence) * max(count, 0))
        elif isinstance(count, int) and isinstance(sequence, list | tuple):
            check_items(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise SecurityError(f"a number of more than {MAX_INT_BITS} bits")


def check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    """Refuse a replacement whose result would be too long."""
    source, wanted = str(measured(text)), str(measured(old))
    check_characters(len(source) + source.count(wanted) * len(str(measured(new))))


def check_percent(text: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a ``%`` format with a large or computed width."""
    if _WIDE_PERCENT.search(str(measured(text))):
        raise SecurityError("a format with a width above 9999 or a computed one")
    for value in (*args, *kwargs.values()):
        measured(value)


def check_braces(text: str, *args: Any, **kwargs: Any) -> None:
    """Refuse a ``{}`` format with a large or computed width."""
    if _WIDE_BRACES.search(text):
        raise SecurityError("a format with a width above 9999 or a computed one")
    longest = sum(len(str(measured(value))) for value in (*args, *kwargs.values()))
    check_characters(len(text) + text.count("{") * longest)


def check_join(values: Any, separator: str) -> Any:
    """Refuse to join too much; return the values, in a list if they came from an iterator."""
    if isinstance(values, Iterable) and not isinstance(values, Mapping | list | tuple | str):
        values = list(values)
    if isinstance(values, list | tuple | str | dict):
        measured(values)
        check_characters(len(values) * len(separator))
    return values

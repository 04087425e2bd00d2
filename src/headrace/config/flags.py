"""Command-line flags generated from the configuration dataclasses: one flag a field, never written by hand."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from headrace.base.errors import ConfigError

T = TypeVar("T")

_KIND_TEXT: dict[type[Any], str] = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
_SUFFIX = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str) -> int:
    """Parse an integer with an optional suffix: k m g are decimal, K M G binary.

    Args:
        text: for example ``4096``, ``0.5G`` or ``32k``.

    Returns:
        The exact whole number.

    Raises:
        argparse.ArgumentTypeError: not such a number.
    """
    factor = _SUFFIX.get(text[-1:], 1)
    digits = text[:-1] if factor != 1 else text
    try:
        value = Decimal(digits) * factor if factor != 1 else Decimal(int(digits))
    except (ValueError, InvalidOperation):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (suffixes k m g K M G are allowed)") from None
    if not value.is_finite() or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def flag_name(field: dataclasses.Field[Any]) -> str:
    """Return the long flag of a field, dashes included."""
    return "--" + str(field.metadata.get("flag") or field.name.replace("_", "-"))


def options_of(section: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a section that have a flag."""
    return [field for field in dataclasses.fields(section) if field.metadata and not field.metadata.get("hidden")]


def _scalar_type(annotation: Any) -> tuple[type[Any], bool]:
    """Return (element type, is a repeated flag)."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _scalar_type(inner[0])
    if origin is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def add_flags(parser: argparse.ArgumentParser, section: type[Any]) -> None:
    """Add one flag for each field of a section. Flags that are not given leave no trace in the namespace.

    Args:
        parser: gets a group titled with the first line of the section's docstring.
        section: a configuration dataclass.
    """
    hints = typing.get_type_hints(section)
    group = parser.add_argument_group((section.__doc__ or section.__name__).strip().splitlines()[0].rstrip("."))
    for field in options_of(section):
        kind, repeated = _scalar_type(hints[field.name])
        names = [flag_name(field)]
        if field.metadata.get("short"):
            names.append("-" + field.metadata["short"])
        default = field.default if field.default is not dataclasses.MISSING else None
        shown = "" if default is None else f" [{default}]"
        common: dict[str, Any] = {
            "dest": f"{section.__name__}.{field.name}",
            "default": argparse.SUPPRESS,
            "help": (field.metadata["help"] + shown).replace("%", "%%"),
        }
        if kind is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        elif repeated:
            group.add_argument(*names, action="append", **common)
        else:
            parse = parse_count if kind is int else kind
            group.add_argument(*names, type=parse, choices=field.metadata.get("choices"), **common)


def section_from(namespace: argparse.Namespace, section: type[T], **extra: Any) -> T:
    """Build a section from parsed flags and check each field's type and range.

    Args:
        namespace: what a parser with `add_flags` returned.
        section: a configuration dataclass.
        **extra: values of fields that have no flag; a flag that was given wins.

    Returns:
        The section.

    Raises:
        ConfigError: a value outside its range.
    """
    values = dict(extra)
    prefix = section.__name__ + "."
    for key, value in vars(namespace).items():
        if key.startswith(prefix):
            values[key[len(prefix) :]] = tuple(value) if isinstance(value, list) else value
    return check_section(section(**values))


def check_section(section: T) -> T:
    """Check type, choices and range of every field of a section; return it.

    A section may have been built in Python, from keyword arguments of a user, so the types are checked too.

    Raises:
        ConfigError: naming the flag, the value and what is allowed.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if not field.metadata:
            continue
        if value is None and _takes_none(hints[field.name]):
            continue
        wrong = _type_fault(hints[field.name], value) or _range_fault(field, value)
        if wrong:
            shown = "" if field.metadata["secret"] else f", got {value!r}"
            raise ConfigError(f"{flag_name(field)} {wrong}{shown}", param=field.name)
    return section


def _takes_none(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation)


def _type_fault(annotation: Any, value: Any) -> str:
    """Return what the value must be, or an empty text if it is that. True is no number; an int is a float."""
    kind, repeated = _scalar_type(annotation)
    if repeated:
        fits = isinstance(value, tuple) and all(isinstance(item, kind) for item in value)
        return "" if fits else f"must be a tuple of {kind.__name__}"
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        return f"must be {_KIND_TEXT.get(kind, kind.__name__)}"
    return ""


def _range_fault(field: dataclasses.Field[Any], value: Any) -> str:
    """Return what is allowed if the value is outside, else an empty text."""
    choices, low, high = field.metadata["choices"], field.metadata["low"], field.metadata["high"]
    if choices is not None and value not in choices:
        return f"must be one of {', '.join(choices)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if low is not None and value < low:
        return f"must be at least {low}"
    if high is not None and value > high:
        return f"must be at most {high}"
    return ""

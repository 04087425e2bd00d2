"""Command-line flags generated from the configuration dataclasses: one flag a field, never written by hand."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any, TypeVar

from headrace.base.errors import ConfigError

T = TypeVar("T")

_SUFFIX = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str) -> int:
    """Parse an integer with an optional suffix: k m g are decimal, K M G binary.

    Raises:
        argparse.ArgumentTypeError: not such a number.
    """
    factor = _SUFFIX.get(text[-1:], 1)
    digits = text[:-1] if factor != 1 else text
    try:
        value = float(digits) * factor if factor != 1 else int(digits)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (suffixes k m g K M G are allowed)") from None
    if value != int(value):
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
    """Add one flag for each field of a section. Flags that are not given leave no trace in the namespace."""
    hints = typing.get_type_hints(section)
    group = parser.add_argument_group((section.__doc__ or section.__name__).strip().splitlines()[0].rstrip("."))
    for field in options_of(section):
        kind, repeated = _scalar_type(hints[field.name])
        names = [flag_name(field)]
        if field.metadata.get("short"):
            names.append("-" + field.metadata["short"])
        default = field.default if field.default is not dataclasses.MISSING else None
        shown = "" if default is None else f" [{default}]"
        help_text = (field.metadata["help"] + shown).replace("%", "%%")
        common: dict[str, Any] = {"dest": f"{section.__name__}.{field.name}", "default": argparse.SUPPRESS, "help": help_text}
        if kind is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        elif repeated:
            group.add_argument(*names, action="append", **common)
        else:
            parse = parse_count if kind is int else kind
            group.add_argument(*names, type=parse, choices=field.metadata.get("choices"), **common)


def section_from(namespace: argparse.Namespace, section: type[T], **extra: Any) -> T:
    """Build a section from parsed flags and check each field's range.

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
    """Check choices and ranges of every field of a section; return it.

    Raises:
        ConfigError: naming the flag, the value and what is allowed.
    """
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if value is None or not field.metadata:
            continue
        choices, low, high = field.metadata["choices"], field.metadata["low"], field.metadata["high"]
        if choices is not None and value not in choices:
            raise ConfigError(f"{flag_name(field)} must be one of {', '.join(choices)}, got {value!r}", param=field.name)
        if low is not None and value < low:
            raise ConfigError(f"{flag_name(field)} must be at least {low}, got {value}", param=field.name)
        if high is not None and value > high:
            raise ConfigError(f"{flag_name(field)} must be at most {high}, got {value}", param=field.name)
    return section

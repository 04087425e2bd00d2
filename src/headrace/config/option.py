"""One option = one dataclass field made by `option`; its help, choices and unit are data, so flags and docs follow."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any = None,
    help: str = "",
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    flag: str | None = None,
    short: str | None = None,
    hidden: bool = False,
    factory: Any = None,
    secret: bool = False,
) -> Any:
    """Declare a configuration field.

    Args:
        default: value when the option is not given (shown in the help).
        help: one sentence.
        choices: the only values allowed.
        low: smallest value allowed.
        high: largest value allowed.
        flag: name on the command line, if it is not the field name with dashes.
        short: one-letter flag.
        hidden: not offered on the command line.
        factory: default factory for collections, in place of ``default``.
        secret: kept out of the section's ``repr``, so that no log shows it.

    Returns:
        A dataclass field.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "flag": flag,
        "short": short,
        "hidden": hidden,
        "secret": secret,
    }
    if factory is not None:
        return field(default_factory=factory, metadata=metadata, repr=not secret)
    return field(default=default, metadata=metadata, repr=not secret)

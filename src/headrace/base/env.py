"""The table of environment variables. A value that does not parse raises; nothing is ignored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 0 or 1")


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty; unset it to get the default")
    return text


def _log_level(text: str) -> str:
    level = text.strip().upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"expected one of {', '.join(LOG_LEVELS)}")
    return level


@dataclass(frozen=True)
class EnvVar:
    """One environment variable.

    Attributes:
        name: as it stands in the environment.
        parse: turns the text into a value; a ValueError says what was expected.
        default: value when the variable is not set.
        doc: one sentence, shown in the docs and in errors.
        secret: True if the value must not be shown in an error.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str
    secret: bool = False


TABLE: tuple[EnvVar, ...] = (
    EnvVar(
        "HEADRACE_API_KEY",
        _text,
        None,
        "Key that clients of the server must send as a bearer token, beside those of --api-key.",
        secret=True,
    ),
    EnvVar(
        "HEADRACE_CACHE_DIR",
        _text,
        None,
        "Directory for compiled kernels and caches (default: the user cache directory).",
    ),
    EnvVar("HEADRACE_LOG_LEVEL", _log_level, "INFO", "Log level: DEBUG, INFO, WARNING or ERROR."),
    EnvVar(
        "HEADRACE_RUNTIME_DIR",
        _text,
        None,
        "Parent of the private 0700 socket directory (default: the system's temporary directory).",
    ),
    EnvVar("HEADRACE_TRACEBACK", _flag, False, "Print the full traceback of an error that ends a command."),
)

_BY_NAME = {row.name: row for row in TABLE}


def check_all(environ: Mapping[str, str] | None = None) -> None:
    """Read every variable of `TABLE`, so that a wrong value is found before any work.

    Args:
        environ: where to look; the environment of the process by default.

    Raises:
        ConfigError: a value does not parse.
    """
    for row in TABLE:
        read(row.name, environ)


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return the parsed value of a variable of `TABLE`.

    Args:
        name: a name of the table.
        environ: where to look; the environment of the process by default.

    Returns:
        The parsed value, or the default if the variable is not set.

    Raises:
        ConfigError: if the value does not parse.
        KeyError: if the variable is not in the table.
    """
    row = _BY_NAME[name]
    raw = (os.environ if environ is None else environ).get(name)
    if raw is None:
        return row.default
    try:
        return row.parse(raw)
    except ValueError as error:
        shown = "***" if row.secret else repr(raw)
        raise ConfigError(f"environment variable {name}={shown}: {error}. {row.doc}", param=name) from error

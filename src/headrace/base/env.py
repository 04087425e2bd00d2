"""The table of environment variables. A value that does not parse raises; nothing is ignored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import ConfigError


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 0 or 1")


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: name, parser, default and what it does."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


TABLE: tuple[EnvVar, ...] = (
    EnvVar("HEADRACE_CACHE_DIR", str, None, "Directory for compiled kernels and caches (default: the user cache directory)."),
    EnvVar("HEADRACE_LOG_LEVEL", str, "INFO", "Log level: DEBUG, INFO, WARNING or ERROR."),
    EnvVar("HEADRACE_RUNTIME_DIR", str, None, "Parent of the private 0700 socket directory (default: the system's temporary directory)."),
    EnvVar("HEADRACE_TRACEBACK", _flag, False, "Print the full traceback of an error that ends a command."),
)

_BY_NAME = {row.name: row for row in TABLE}


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return the parsed value of a variable of `TABLE`.

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
        raise ConfigError(f"environment variable {name}={raw!r}: {error}. {row.doc}", param=name) from error

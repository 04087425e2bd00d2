"""One logger factory. Log lines go to standard error, so that standard output stays for results."""

from __future__ import annotations

import logging
import sys

from headrace.base import env

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (pass ``__name__``)."""
    return logging.getLogger(name)


def adopt_logger(name: str) -> None:
    """Send the warnings and errors of a library's logger through the handler of `setup_logging`, in the same form."""
    library = logging.getLogger(name)
    library.handlers[:] = logging.getLogger("headrace").handlers
    library.setLevel(logging.WARNING)
    library.propagate = False


def setup_logging(process_name: str | None = None) -> None:
    """Configure the ``headrace`` logger of this process once. Library use leaves logging alone.

    Args:
        process_name: shown in brackets at the start of each line.

    Raises:
        ConfigError: HEADRACE_LOG_LEVEL is not a level.
    """
    root = logging.getLogger("headrace")
    if root.handlers:
        return
    level = str(env.read("HEADRACE_LOG_LEVEL"))
    prefix = f"[{process_name}] ".replace("%", "%%") if process_name else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False

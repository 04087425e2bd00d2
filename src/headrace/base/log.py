"""One logger factory. Log lines go to standard error, so that standard output stays for results."""

from __future__ import annotations

import logging
import sys

from headrace.base import env

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (pass ``__name__``)."""
    return logging.getLogger(name)


def setup_logging(process_name: str | None = None) -> None:
    """Configure the ``headrace`` logger of this process once. Library use leaves logging alone."""
    root = logging.getLogger("headrace")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[{process_name}] " if process_name else ""
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(str(env.read("HEADRACE_LOG_LEVEL")).upper())
    root.propagate = False

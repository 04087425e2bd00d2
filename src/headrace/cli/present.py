"""How an error that ends a command is shown: one line with what happened and what to do, and an exit code.

Must not import anything slow: it is loaded by every command, ``--help`` included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from headrace.base import env
from headrace.base.errors import ConfigError, HeadraceError, RequestError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UsageError(ConfigError):
    """The command line itself is wrong: an unknown command or flag, or a value that does not parse."""

    code = "usage"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known word that is most like ``word``, or an empty text."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ended with this error.

    Wrong usage, configuration and request values are 2, an interrupt is 130, everything else is 1.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else (EXIT_OK if error.code is None else EXIT_FAILED)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_FAILED


def error_line(error: BaseException) -> str:
    """Return the one line that describes an error."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, HeadraceError):
        return "error: " + " ".join(error.message.split())
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        return f"error: {text}. Run headrace doctor to see what is missing"
    if isinstance(error, OSError):
        return f"error: {text}. Set HEADRACE_TRACEBACK=1 to see where"
    if isinstance(error, MemoryError):
        return "error: out of memory. headrace plan MODEL shows what fits on this machine"
    name = type(error).__name__
    return f"error: {name}{': ' + text if text else ''}. This looks like a bug; set HEADRACE_TRACEBACK=1 to see where"


def report_error(error: BaseException) -> int:
    """Print the line of an error on standard error (with the traceback if HEADRACE_TRACEBACK=1).

    Returns:
        The exit code.
    """
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return exit_code(error)
    if isinstance(error, BrokenPipeError):  # the reader of our output left; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    if _wants_traceback():
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    line = str(error.code) if isinstance(error, SystemExit) else error_line(error)
    print(f"headrace: {line}", file=sys.stderr)
    return exit_code(error)


def _wants_traceback() -> bool:
    try:
        return bool(env.read("HEADRACE_TRACEBACK"))
    except ConfigError:  # an unreadable switch must not hide the error it is about
        return True

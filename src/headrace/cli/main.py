"""Entry point of ``headrace``: picks the command and turns errors into one line and an exit code.

Must not import a command before it is chosen, nor anything slow: ``headrace --help`` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from headrace.base import env
from headrace.cli.present import UsageError, nearest, report_error
from headrace.version import __version__


class Command(NamedTuple):
    """One subcommand: the module that has ``run(argv) -> int``, and a line for the help."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "serve": Command("headrace.cli.serve", "start the OpenAI-compatible HTTP server"),
    "chat": Command("headrace.cli.chat", "talk to a model in the terminal"),
    "complete": Command("headrace.cli.complete", "continue a text"),
    "bench": Command("headrace.cli.bench", "measure latency, throughput, a server, start-up, or the scheduler"),
    "plan": Command("headrace.cli.plan", "size weights, KV cache and concurrency for a device you need not have"),
    "sim": Command("headrace.cli.sim", "drive scheduler and KV cache at random against a content oracle"),
    "doctor": Command("headrace.cli.doctor", "check this machine and say what to do"),
}


def overview() -> str:
    """Return the text of ``headrace --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: headrace COMMAND [arguments]\n\nHeadrace {__version__}: an LLM inference and serving engine.\n\n"
        f"commands:\n{rows}\n\noptions:\n  -h, --help  show this text; headrace COMMAND --help explains one command\n"
        "  --version   show the version\n"
    )


def run(argv: Sequence[str]) -> int:
    """Run one command.

    Args:
        argv: the arguments after ``headrace``.

    Returns:
        The exit code.

    Raises:
        UsageError: no or an unknown command.
        HeadraceError: whatever the command raised.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        print(f"headrace {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        kind = "option" if argv[0].startswith("-") else "command"
        raise UsageError(f"unknown {kind} {argv[0]!r}{nearest(argv[0], COMMANDS)}. Run headrace --help")
    if argv[0] != "doctor":  # which reports all that is wrong
        env.check_all()
    return int(importlib.import_module(command.module).run(list(argv[1:])))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and present its errors.

    Args:
        argv: the arguments; None takes them from the process.

    Returns:
        Exit code: 0 done, 1 failed while running, 2 wrong usage or configuration, 130 interrupted.
    """
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BaseException as error:  # the last line of defence: every error ends in one line and a code
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())

"""``headrace chat``: a conversation in the terminal, or one question and its answer.

The answer goes to standard output as it comes; everything else goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base import env
from headrace.base.errors import HeadraceError
from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.parser import CommandParser
from headrace.cli.present import EXIT_INTERRUPTED, EXIT_OK, UsageError, error_line
from headrace.cli.sampling_flags import SamplingOptions, sampling_fields
from headrace.config.flags import section_from
from headrace.config.option import option

if TYPE_CHECKING:
    import argparse

    from headrace.cli.talk import Talker

COMMANDS_HELP = """\
/help           this list
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and forget the conversation
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer that is being written; at the prompt it leaves."""


@dataclass(frozen=True)
class TalkOptions:
    """Whom to talk to."""

    model: str | None = option(None, "Model, as for headrace serve; with --url the name to send [default].")
    url: str | None = option(None, "Use a running server with OpenAI's API in place of an engine of this command.")
    api_key: str | None = option(None, "Bearer token for --url (default: HEADRACE_API_KEY).")


def add_talk_flags(parser: CommandParser) -> None:
    """Add what ``chat`` and ``complete`` have in common."""
    parser.add_topic("talk", TalkOptions)
    parser.add_topic("sampling", SamplingOptions)
    add_engine_flags(parser)


def make_talker(flags: argparse.Namespace) -> Talker:
    """Return what answers: a server if ``--url`` is given, else an engine of this process.

    Raises:
        ConfigError: options out of range or in conflict.
    """
    from headrace.cli.talk import LocalTalker, RemoteTalker

    options = section_from(flags, TalkOptions)
    if options.url is not None:
        return RemoteTalker(options.url, options.model, options.api_key or env.read("HEADRACE_API_KEY"))
    os.environ.setdefault("HEADRACE_LOG_LEVEL", "WARNING")  # the terminal belongs to the conversation
    return LocalTalker(engine_config(flags, options.model or "default"))


def build_parser() -> CommandParser:
    """Return the parser of this command."""
    parser = CommandParser(
        "chat",
        "Talk to a model. Without TEXT: a conversation in a terminal, or the question from a pipe.",
        usage="[TEXT] [flags]",
        epilog="In a conversation, /help lists its commands.",
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", help="question; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_talk_flags(parser)
    return parser


def text_from(argument: str | None, what: str) -> str | None:
    """Return the text of the argument or of standard input; None if the user should be asked in the terminal.

    Raises:
        UsageError: an empty text.
    """
    if argument is None and sys.stdin.isatty():
        return None
    text = sys.stdin.read() if argument in (None, "-") else argument
    if not text or not text.strip():
        raise UsageError(f"the {what} is empty; give it as an argument or through a pipe")
    return text


def write(piece: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def run(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    flags = build_parser().parse(argv)
    question = text_from(flags.text, "question")
    sampling = sampling_fields(flags)
    talker = make_talker(flags)
    system = [{"role": "system", "content": flags.system}] if flags.system else []
    with asyncio.Runner() as runner:
        try:
            if question is None and sys.stdin.isatty():
                print("loading ...", file=sys.stderr)
            runner.run(talker.start())
            if question is not None:
                runner.run(_answer(talker, [*system, {"role": "user", "content": question}], sampling))
                write("\n")
                return EXIT_OK
            return Conversation(runner, talker, system, sampling).run()
        finally:
            runner.run(talker.stop())


async def _answer(talker: Talker, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    from headrace.cli.talk import write_answer

    return await write_answer(talker.chat(messages, sampling), write)


class Conversation:
    """A conversation in the terminal: its messages so far, and the commands that begin with a slash."""

    def __init__(
        self, runner: asyncio.Runner, talker: Talker, system: list[dict[str, str]], sampling: dict[str, Any]
    ) -> None:
        self._runner = runner
        self._talker = talker
        self._system = system
        self._sampling = sampling
        self._turns: list[dict[str, str]] = []

    def run(self) -> int:
        """Ask and answer until the user leaves; return the exit code."""
        try:
            import readline  # noqa: F401  (gives input() editing and history)
        except ImportError:
            print("no line editing: this Python has no readline", file=sys.stderr)
        print("/help lists the commands, Ctrl-D leaves", file=sys.stderr)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return EXIT_OK
            except KeyboardInterrupt:
                print()
                return EXIT_INTERRUPTED
            if line.startswith("/"):
                if self._command(line):
                    return EXIT_OK
            elif line:
                self._turn(line)

    def _command(self, line: str) -> bool:
        """Run a slash command; return True if the user leaves."""
        word, _, rest = line.partition(" ")
        if word in ("/quit", "/exit"):
            return True
        if word == "/reset":
            self._turns.clear()
            print("forgotten", file=sys.stderr)
        elif word == "/system":
            self._system = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            self._turns.clear()
            print("set" if self._system else "removed", file=sys.stderr)
        elif word == "/help":
            print(COMMANDS_HELP, file=sys.stderr)
        else:
            print(f"unknown command {word}\n{COMMANDS_HELP}", file=sys.stderr)
        return False

    def _turn(self, line: str) -> None:
        """Answer one message. A failed or stopped answer is not part of the conversation."""
        from headrace.cli.talk import is_request_error

        asked = {"role": "user", "content": line}
        try:
            text = self._runner.run(_answer(self._talker, [*self._system, *self._turns, asked], self._sampling))
        except KeyboardInterrupt:
            print("\nstopped; this answer is forgotten", file=sys.stderr)
            return
        except HeadraceError as error:
            if not is_request_error(error) and not error.retryable:
                raise
            print(f"\n{error_line(error)}. /reset starts a new conversation", file=sys.stderr)
            return
        print()
        self._turns += [asked, {"role": "assistant", "content": text}]

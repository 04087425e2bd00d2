"""``headrace complete TEXT``: continue a text, without a chat template."""

from __future__ import annotations

import asyncio

from headrace.cli.chat import add_talk_flags, make_talker, text_from, write
from headrace.cli.parser import CommandParser
from headrace.cli.present import EXIT_OK, UsageError
from headrace.cli.sampling_flags import sampling_fields

DEFAULT_MAX_TOKENS = 128


def build_parser() -> CommandParser:
    """Return the parser of this command."""
    parser = CommandParser(
        "complete",
        f"Continue a text, {DEFAULT_MAX_TOKENS} tokens at most unless --max-tokens says more.",
        usage="TEXT [flags]",
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", help="text to continue; - or a pipe: from standard input")
    add_talk_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    from headrace.cli.talk import write_answer

    flags = build_parser().parse(argv)
    text = text_from(flags.text, "text")
    if text is None:
        raise UsageError("no text: headrace complete TEXT, or give it through a pipe")
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_fields(flags)}
    talker = make_talker(flags)
    with asyncio.Runner() as runner:
        try:
            runner.run(talker.start())
            runner.run(write_answer(talker.complete(text, sampling), write))
            write("\n")
        finally:
            runner.run(talker.stop())
    return EXIT_OK

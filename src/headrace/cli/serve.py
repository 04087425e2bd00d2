"""``headrace serve``: start the HTTP server."""

from __future__ import annotations

from dataclasses import replace

from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.parser import CommandParser
from headrace.config import KvEventsConfig, ServerConfig, check_rules
from headrace.config.flags import section_from


def build_parser() -> CommandParser:
    """Return the parser of this command."""
    parser = CommandParser(
        "serve",
        "Start the OpenAI-compatible HTTP server.",
        usage="[MODEL] [flags]",
        epilog="--help=TOPIC shows one group (model, cache, scheduler, parallel, events, server); "
        "--help=WORD searches.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="default",
        help="directory, .gguf file, hub name ORG/NAME, or 'default' (SmolLM2-135M-Instruct) [default]",
    )
    add_engine_flags(parser)
    parser.add_topic("events", KvEventsConfig)
    parser.add_topic("server", ServerConfig)
    return parser


def run(argv: list[str]) -> int:
    """Run the command until it is told to stop; return its exit code."""
    flags = build_parser().parse(argv)
    engine = replace(engine_config(flags, flags.model), events=section_from(flags, KvEventsConfig))
    check_rules(engine)
    if engine.events.kv_events is not None:
        from headrace.observe.kv_events import KvEventPublisher

        KvEventPublisher.check(engine.events)
    server = section_from(flags, ServerConfig)
    from headrace.serve.server import run_server

    return int(run_server(engine, server) or 0)

"""``headrace bench KIND``: parse the flags, run the benchmark, print its JSON line last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.parser import CommandParser
from headrace.cli.present import EXIT_FAILED, EXIT_OK, UsageError, nearest
from headrace.config.flags import section_from

if TYPE_CHECKING:
    from headrace.bench.report import Report

SUMMARIES = {
    "latency": "one batch at a time, offline: first token, decode step",
    "throughput": "many requests at once, offline",
    "serve": "load on any server with OpenAI's API",
    "startup": "seconds until headrace serve is ready and has answered",
    "scheduler": "microseconds of the control plane in a step, without a model",
}


def _sentence(name: str) -> str:
    return f"{SUMMARIES[name][0].upper()}{SUMMARIES[name][1:]}."


def _with_model(name: str) -> CommandParser:
    parser = CommandParser(f"bench {name}", _sentence(name), usage="[MODEL] [flags]")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="default", help="model, as for headrace serve [default]"
    )
    return parser


def latency_parser() -> CommandParser:
    """Return the parser of ``bench latency``."""
    from headrace.bench.latency import LatencyOptions

    parser = _with_model("latency")
    parser.add_topic("bench", LatencyOptions)
    add_engine_flags(parser)
    return parser


def throughput_parser() -> CommandParser:
    """Return the parser of ``bench throughput``."""
    from headrace.bench.throughput import ThroughputOptions

    parser = _with_model("throughput")
    parser.add_topic("bench", ThroughputOptions)
    add_engine_flags(parser)
    return parser


def serve_parser() -> CommandParser:
    """Return the parser of ``bench serve``."""
    from headrace.bench.serve import ServeBenchOptions

    parser = CommandParser("bench serve", _sentence("serve"))
    parser.add_topic("bench", ServeBenchOptions)
    return parser


def startup_parser() -> CommandParser:
    """Return the parser of ``bench startup``; it takes the flags of the engine for the servers it starts."""
    from headrace.bench.startup import StartupOptions

    parser = _with_model("startup")
    parser.add_topic("bench", StartupOptions)
    add_engine_flags(parser)
    return parser


def scheduler_parser() -> CommandParser:
    """Return the parser of ``bench scheduler``."""
    from headrace.bench.scheduler import SchedulerOptions

    parser = CommandParser("bench scheduler", _sentence("scheduler"))
    parser.add_topic("bench", SchedulerOptions)
    return parser


PARSERS: dict[str, Callable[[], CommandParser]] = {
    "latency": latency_parser,
    "throughput": throughput_parser,
    "serve": serve_parser,
    "startup": startup_parser,
    "scheduler": scheduler_parser,
}


def _latency(argv: list[str]) -> Report:
    from headrace.bench import latency

    flags = latency_parser().parse(argv)
    options = section_from(flags, latency.LatencyOptions)
    config = engine_config(
        flags,
        flags.model,
        cache={"enable_prefix_caching": False},
        scheduler={
            "max_num_seqs": max(64, options.batch_size),
            "max_num_batched_tokens": max(2048, options.batch_size),
        },
    )
    return latency.run(config, options)


def _throughput(argv: list[str]) -> Report:
    from headrace.bench import throughput

    flags = throughput_parser().parse(argv)
    options = section_from(flags, throughput.ThroughputOptions)
    config = engine_config(
        flags,
        flags.model,
        cache={"enable_prefix_caching": False},
        scheduler={"max_queue": max(4096, options.num_prompts)},
    )
    return throughput.run(config, options)


def _serve(argv: list[str]) -> Report:
    from headrace.bench import serve

    return serve.run(section_from(serve_parser().parse(argv), serve.ServeBenchOptions))


def _startup(argv: list[str]) -> Report:
    from headrace.bench import startup
    from headrace.bench.offline import option_values
    from headrace.weights.source import resolve_model

    flags = startup_parser().parse(argv)
    options = section_from(flags, startup.StartupOptions)
    config = engine_config(flags, flags.model)
    files = resolve_model(config.model)
    return startup.run(flags.model, files.weight_paths, flag_words(option_values(config)), options)


def _scheduler(argv: list[str]) -> Report:
    from headrace.bench import scheduler

    return scheduler.run(section_from(scheduler_parser().parse(argv), scheduler.SchedulerOptions))


def flag_words(values: dict[str, object]) -> list[str]:
    """Return options as the words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


RUNNERS: dict[str, Callable[[list[str]], Report]] = {
    "latency": _latency,
    "throughput": _throughput,
    "serve": _serve,
    "startup": _startup,
    "scheduler": _scheduler,
}


def overview() -> str:
    """Return the text of ``headrace bench --help``."""
    rows = "\n".join(f"  {name:<11} {summary}" for name, summary in SUMMARIES.items())
    return (
        f"usage: headrace bench KIND [arguments]\n\n{rows}\n\n"
        "The last line on standard output is one JSON document; docs/benchmarks.md explains its fields.\n"
        "headrace bench KIND --help shows the flags.\n"
    )


def run(argv: list[str]) -> int:
    """Run one benchmark; return 1 if a request of ``bench serve`` failed, else 0.

    Raises:
        UsageError: no or an unknown kind.
        HeadraceError: as the benchmark.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(overview(), end="")
        return EXIT_OK if argv else 2
    kind, rest = argv[0], argv[1:]
    if kind not in RUNNERS:
        raise UsageError(f"unknown benchmark {kind!r}{nearest(kind, RUNNERS)}. Run headrace bench --help")
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in rest):
        PARSERS[kind]().parse(rest)
    from headrace.bench.report import ServeReport, stdout_reserved, to_json_line

    with stdout_reserved():
        report = RUNNERS[kind](rest)
    print(to_json_line(report), flush=True)
    return EXIT_FAILED if isinstance(report, ServeReport) and report.failed else EXIT_OK

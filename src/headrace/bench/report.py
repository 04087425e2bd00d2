"""What a benchmark reports: percentiles, the JSON document of each benchmark, and how it is printed.

The structs below are the documented schema (docs/benchmarks.md). A field keeps its name and unit for good; a change
of meaning gets a new number in ``schema``. Must not measure anything.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from headrace.base.errors import ConfigError
from headrace.version import __version__


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a list of numbers, in the unit of its key; percentiles interpolate linearly between neighbours."""

    samples: int
    mean: float
    median: float
    p90: float
    p99: float
    min: float
    max: float


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a figure comes from.

    Attributes:
        headrace: version of Headrace (of the client, for ``bench serve``).
        torch: version and build of torch, "" if not installed.
        python: version.
        system: operating system, kernel and architecture.
        processor: name of the CPU.
        cores: CPUs that this process may use.
    """

    headrace: str
    torch: str
    python: str
    system: str
    processor: str
    cores: int


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """`headrace bench latency`. Plain numbers are medians over the iterations; see ``percentiles`` for the rest.

    Attributes:
        schema: "headrace.bench.latency/1".
        model: MODEL as given.
        device: cpu or cuda.
        dtype: of the activations.
        quantization: of the linears: "int8" or "none".
        tensor_parallel_size: ranks.
        batch_size: requests at once.
        input_len: prompt tokens of each.
        output_len: output tokens of each.
        warmup_iterations: iterations not counted.
        iterations: iterations counted.
        ttft_ms: milliseconds of a run with one output token (prefill of the whole batch and one sample).
        decode_ms_per_step: (run with ``output_len`` tokens - run with one) / (``output_len`` - 1), 0 if that is 0 / 0.
        e2e_ms: milliseconds of the run with ``output_len`` tokens.
        tokens_per_s: output tokens of the batch / ``e2e_ms``: prefill included.
        decode_tokens_per_s: ``batch_size`` / ``decode_ms_per_step``: prefill left out; 0 if ``output_len`` is 1.
        percentiles: keys ttft_ms, decode_ms_per_step, e2e_ms.
        load_s: seconds from the start of the engine until it could take requests.
        environment: versions and machine.
    """

    NAME: ClassVar[str] = "headrace.bench.latency/1"
    schema: str = "headrace.bench.latency/1"
    model: str
    device: str
    dtype: str
    quantization: str
    tensor_parallel_size: int
    batch_size: int
    input_len: int
    output_len: int
    warmup_iterations: int
    iterations: int
    ttft_ms: float
    decode_ms_per_step: float
    e2e_ms: float
    tokens_per_s: float
    decode_tokens_per_s: float
    percentiles: dict[str, Percentiles]
    load_s: float
    environment: Environment


class ThroughputReport(msgspec.Struct, frozen=True, kw_only=True):
    """`headrace bench throughput`: all requests handed over at once to the offline engine.

    Attributes:
        schema: "headrace.bench.throughput/1".
        model: MODEL as given.
        device: cpu or cuda.
        dtype: of the activations.
        quantization: of the linears: "int8" or "none".
        tensor_parallel_size: ranks.
        num_prompts: requests.
        lengths: "fixed" or "mixed".
        seed: of lengths and prompts.
        input_tokens: prompt tokens of all requests.
        output_tokens: output tokens of all requests.
        elapsed_s: from the first request in to the last token out.
        requests_per_s: ``num_prompts`` / ``elapsed_s``.
        output_tokens_per_s: output tokens / ``elapsed_s``.
        total_tokens_per_s: input and output tokens / ``elapsed_s``.
        load_s: seconds from the start of the engine until it could take requests.
        environment: versions and machine.
    """

    NAME: ClassVar[str] = "headrace.bench.throughput/1"
    schema: str = "headrace.bench.throughput/1"
    model: str
    device: str
    dtype: str
    quantization: str
    tensor_parallel_size: int
    num_prompts: int
    lengths: str
    seed: int
    input_tokens: int
    output_tokens: int
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    load_s: float
    environment: Environment


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """`headrace bench serve`: load on any OpenAI server, seen from the client.

    Attributes:
        schema: "headrace.bench.serve/1".
        url: server.
        model: model name sent.
        endpoint: "completions" or "chat".
        prompt_kind: "ids" or "text".
        lengths: "fixed" or "mixed".
        seed: of arrivals, lengths and prompts.
        num_prompts: requests.
        completed: requests answered to the end.
        failed: requests refused or broken off.
        first_error: of the first failed request, else null.
        max_concurrency: most requests in flight; null: no limit.
        request_rate: mean Poisson arrivals a second; null: all at once.
        input_tokens: prompt tokens of completed requests (as the server counts them, else as sent).
        output_tokens: output tokens of completed requests (as the server counts them, else streamed events).
        tokens_counted_by: "server" (usage) or "client".
        elapsed_s: from the first request to the end of the last answer.
        requests_per_s: ``completed`` / ``elapsed_s``.
        output_tokens_per_s: output tokens / ``elapsed_s``.
        total_tokens_per_s: input and output tokens / ``elapsed_s``.
        ttft_ms: median milliseconds from sending a request to its first token.
        tpot_ms: median over requests of (last token - first token) / (output tokens - 1).
        itl_ms: median gap between two streamed events of one request.
        e2e_ms: median milliseconds from sending a request to its last token.
        percentiles: keys ttft_ms, tpot_ms, itl_ms, e2e_ms.
        client_cpu_s: CPU seconds that the load generator itself took.
        environment: versions and machine of the client.
    """

    NAME: ClassVar[str] = "headrace.bench.serve/1"
    schema: str = "headrace.bench.serve/1"
    url: str
    model: str
    endpoint: str
    prompt_kind: str
    lengths: str
    seed: int
    num_prompts: int
    completed: int
    failed: int
    first_error: str | None
    max_concurrency: int | None
    request_rate: float | None
    input_tokens: int
    output_tokens: int
    tokens_counted_by: str
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    e2e_ms: float
    percentiles: dict[str, Percentiles]
    client_cpu_s: float
    environment: Environment


class StartRun(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a server.

    Attributes:
        kind: "cold" (model file out of the page cache, empty cache directory) or "warm".
        ready_s: seconds from the command until ``/health`` answered 200.
        first_answer_s: seconds from the command until the first chat answer was complete.
    """

    kind: str
    ready_s: float
    first_answer_s: float


class StartupReport(msgspec.Struct, frozen=True, kw_only=True):
    """`headrace bench startup`: starts of ``headrace serve`` in processes of their own.

    Attributes:
        schema: "headrace.bench.startup/1".
        model: MODEL as given.
        cold_ready_s: median of the cold starts; null if there were none.
        cold_first_answer_s: the same, to the first chat answer.
        warm_ready_s: median of the warm starts; null if there were none.
        warm_first_answer_s: the same, to the first chat answer.
        runs: each start, in order.
        environment: versions and machine.
    """

    NAME: ClassVar[str] = "headrace.bench.startup/1"
    schema: str = "headrace.bench.startup/1"
    model: str
    cold_ready_s: float | None
    cold_first_answer_s: float | None
    warm_ready_s: float | None
    warm_first_answer_s: float | None
    runs: list[StartRun]
    environment: Environment


class SchedulerCell(msgspec.Struct, frozen=True, kw_only=True):
    """One load of ``bench scheduler``. Times are of one step: schedule + apply + encode.

    Attributes:
        context_tokens: prompt tokens of each request.
        arrivals_per_step: requests started in a step on average; as many end. 0 in the steady cell.
        p50_us: median.
        p99_us: 99th percentile.
        p50_cpu_us: as ``p50_us``, CPU time of the thread: what others on the machine take is left out.
        p99_cpu_us: as ``p99_us``, CPU time of the thread.
        schedule_us: median of this part.
        encode_us: median of this part: the plan for the ranks and the news for the front end.
        apply_us: median of this part.
        plan_bytes: median size of the encoded plan.
        news_bytes: median size of the encoded news.
    """

    context_tokens: int
    arrivals_per_step: float
    p50_us: float
    p99_us: float
    p50_cpu_us: float
    p99_cpu_us: float
    schedule_us: float
    encode_us: float
    apply_us: float
    plan_bytes: float
    news_bytes: float


class SchedulerReport(msgspec.Struct, frozen=True, kw_only=True):
    """`headrace bench scheduler`: cost of the control plane without model, device or sockets.

    Attributes:
        schema: "headrace.bench.scheduler/1".
        running: requests that run.
        steps: measured in each cell.
        unique_tokens: prompt tokens that a request shares with nobody, at least.
        output_tokens: of a request that arrives.
        calibration_us: of a fixed piece of Python on this machine, the best of many runs.
        cells: for each context: steady, then with arrivals.
        environment: versions and machine.
    """

    NAME: ClassVar[str] = "headrace.bench.scheduler/1"
    schema: str = "headrace.bench.scheduler/1"
    running: int
    steps: int
    unique_tokens: int
    output_tokens: int
    calibration_us: float
    cells: list[SchedulerCell]
    environment: Environment


Report = LatencyReport | ThroughputReport | ServeReport | StartupReport | SchedulerReport
REPORTS: tuple[type[Report], ...] = (LatencyReport, ThroughputReport, ServeReport, StartupReport, SchedulerReport)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of an ascending, non-empty list lies, linear between neighbours.

    Args:
        ordered: ascending numbers, at least one.
        share: in [0, 1].
    """
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Percentiles:
    """Return the summary of a list of numbers; of an empty list all zeros with ``samples`` 0."""
    if not values:
        return Percentiles(samples=0, mean=0.0, median=0.0, p90=0.0, p99=0.0, min=0.0, max=0.0)
    ordered = sorted(values)
    return Percentiles(
        samples=len(ordered),
        mean=sum(ordered) / len(ordered),
        median=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        min=ordered[0],
        max=ordered[-1],
    )


def environment() -> Environment:
    """Return versions and machine of this process, without importing torch."""
    from importlib import metadata

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return Environment(
        headrace=__version__,
        torch=torch,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the standard library's answer is all there is
    return platform.processor() or platform.machine()


def to_json_line(report: Report) -> str:
    """Return the report as one line of JSON, figures rounded to six significant digits."""
    return msgspec.json.encode(_rounded(msgspec.to_builtins(report))).decode()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def parse_report(line: str | bytes) -> Report:
    """Read a report back.

    Raises:
        ConfigError: not JSON, an unknown ``schema``, or a field that is missing or of the wrong type.
    """
    try:
        name = msgspec.json.decode(line).get("schema")
        for kind in REPORTS:
            if name == kind.NAME:
                return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, AttributeError) as error:
        raise ConfigError(f"not a benchmark report: {error}") from error
    raise ConfigError(f"unknown benchmark schema {name!r}; known: {', '.join(kind.NAME for kind in REPORTS)}")


@contextlib.contextmanager
def stdout_reserved() -> Iterator[None]:
    """Send everything that is written to standard output meanwhile, by child processes too, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def say(text: str) -> None:
    """Print a line for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def show_percentiles(table: dict[str, Percentiles]) -> None:
    """Print a table of percentiles for people, on standard error."""
    say(f"{'':<20}{'mean':>11}{'median':>11}{'p90':>11}{'p99':>11}{'samples':>9}")
    for name, row in table.items():
        say(f"{name:<20}{row.mean:>11.3f}{row.median:>11.3f}{row.p90:>11.3f}{row.p99:>11.3f}{row.samples:>9}")

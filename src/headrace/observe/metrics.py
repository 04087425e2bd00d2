"""Prometheus metrics of the server, with vLLM's names under the prefix ``headrace:``, in a registry of their own.

Scheduler numbers are read when somebody scrapes; request numbers are recorded as requests run. Must not know HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.types.outputs import SchedulerStats

PREFIX = "headrace:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_S = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
FINISH_REASONS = ("stop", "length", "abort", "error")


class _SchedulerCollector(Collector):
    """Turns the scheduler's latest numbers into metrics. Counters go on rising when a new core starts from zero."""

    def __init__(
        self, labels: tuple[str, str], stats: Callable[[], SchedulerStats], restarts: Callable[[], int]
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._restarts = restarts
        self._last: dict[str, float] = {}
        self._base: dict[str, float] = {}

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        stats = self._stats()
        used = (stats.blocks_total - stats.blocks_free) / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("num_requests_running", "Requests that take part in steps.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for their first step.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use by requests; 1 is full.", used)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens)
        yield self._counter("num_preemptions", "Preemptions.", stats.preemptions)
        yield self._counter("core_restarts", "Restarts of the engine core after a crash.", self._restarts())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        last = self._last.get(name, 0.0)
        if value < last:
            self._base[name] = self._base.get(name, 0.0) + last
        self._last[name] = value
        family = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        family.add_metric(self._labels, self._base.get(name, 0.0) + value)
        return family


class ServerMetrics:
    """All metrics of one server.

    Args:
        model_name: label of every sample.
        stats: returns the scheduler's latest numbers.
        restarts: returns how often the core was restarted.
        now_s: monotonic seconds.
    """

    def __init__(
        self,
        model_name: str,
        *,
        stats: Callable[[], SchedulerStats],
        restarts: Callable[[], int],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now_s = now_s
        self._registry = CollectorRegistry()
        labels = (model_name, "0")
        self._registry.register(_SchedulerCollector(labels, stats, restarts))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(PREFIX + name, text, _LABELS, buckets=buckets, registry=self._registry)
            return family.labels(*labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, _LABELS, registry=self._registry).labels(*labels)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced output.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Those of them taken from the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Output tokens.")
        success = Counter(
            PREFIX + "request_success", "Finished sequences.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self.finished = {reason: success.labels(*labels, reason) for reason in FINISH_REASONS}
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of one sequence.", _BETWEEN_TOKENS_S
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_S)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From arrival to the first time in a step.", _REQUEST_S
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Output tokens of a sequence.", _TOKENS)

    def begin(self, sequences: int) -> RequestTrack:
        """Start to follow a request of ``sequences`` outputs that arrives now."""
        return RequestTrack(self, sequences)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestTrack:
    """Follows one request from arrival to its end."""

    def __init__(self, metrics: ServerMetrics, sequences: int) -> None:
        self._metrics = metrics
        self._arrival_s = metrics.now_s()
        self._last_s: list[float] = [0.0] * sequences
        self._tokens = [0] * sequences
        self._open = [True] * sequences

    def prompt(self, tokens: int, cached_tokens: int) -> None:
        """Record a prompt that was processed."""
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.prompt_tokens_cached.inc(cached_tokens)
        self._metrics.request_prompt_tokens.observe(tokens)

    def queued(self, seconds: float) -> None:
        """Record how long a sequence waited for its first step."""
        self._metrics.queue_time.observe(seconds)

    def output(self, sequence: int, tokens: int) -> None:
        """Record output tokens that have just come."""
        if tokens == 0:
            return
        metrics = self._metrics
        now_s = metrics.now_s()
        if self._tokens[sequence]:
            metrics.inter_token_latency.observe((now_s - self._last_s[sequence]) / tokens)
        else:
            metrics.time_to_first_token.observe(now_s - self._arrival_s)
        self._tokens[sequence] += tokens
        self._last_s[sequence] = now_s
        metrics.generation_tokens.inc(tokens)

    def finish(self, sequence: int, reason: str) -> None:
        """Record the end of a sequence, once."""
        if not self._open[sequence]:
            return
        self._open[sequence] = False
        metrics = self._metrics
        metrics.finished[reason].inc()
        metrics.e2e_latency.observe(metrics.now_s() - self._arrival_s)
        metrics.request_generation_tokens.observe(self._tokens[sequence])

    def finish_rest(self, reason: str) -> None:
        """Record the end of all sequences that are still open."""
        for sequence in range(len(self._open)):
            self.finish(sequence, reason)

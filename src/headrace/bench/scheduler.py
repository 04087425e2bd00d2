"""``bench scheduler``: microseconds that the control plane takes of each step, without model, device or sockets.

Measured is what one thread does between two steps of the device: `Scheduler.schedule` with its inbox, the plan encoded
as ranks get it, `Scheduler.apply`, and the news encoded as the front end gets them. Making requests and results is
not. Must not import torch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

from headrace.base.errors import invariant
from headrace.base.ids import RequestId
from headrace.bench.report import SchedulerCell, SchedulerReport, environment, percentile, say
from headrace.config import SchedulerConfig
from headrace.config.option import option
from headrace.engine.collector import Collector
from headrace.kv.budget import make_layout
from headrace.kv.prefix_hash import block_hashes
from headrace.parallel.rank_process import ENCODER, Execute
from headrace.sched.request import Request
from headrace.sched.scheduler import Scheduler
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
from headrace.types.events import AddRequest, InboxEvent
from headrace.types.plans import StepPlan
from headrace.types.requests import EngineRequest
from headrace.types.results import RowResult, StepResult
from headrace.types.sampling import SamplingParams
from headrace.types.wire import decode_to_core, encode, outputs_of

BLOCK_TOKENS = 16
DOCUMENTS = 8
"""Beginnings that requests share."""
BUDGET_TOKENS = 65536
_TOKEN_IDS = 150_000
_TOKEN = 7
_WARMUP_STEPS = 60
_FIRST_OUTPUT_TOKENS = 40


@dataclass(frozen=True)
class SchedulerOptions:
    """Cost of the scheduler."""

    running: int = option(256, "Requests that run.", low=10, high=65536)
    short_context_tokens: int = option(1000, "Prompt tokens of each request, first pair of cells.", low=512)
    long_context_tokens: int = option(100_000, "Prompt tokens of each request, second pair of cells.", low=512)
    unique_tokens: int = option(128, "Prompt tokens that a request shares with nobody.", low=16, high=256)
    output_tokens: int = option(10, "Output tokens of a request that arrives: one in so many ends a step.", low=2)
    steps: int = option(400, "Steps measured in each cell.", low=10)


@dataclass
class Samples:
    """Nanoseconds of each measured step, by part; wall time and CPU time of the thread."""

    parts: dict[str, list[int]] = field(default_factory=lambda: {"schedule": [], "encode": [], "apply": []})
    wall: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)
    news_bytes: list[int] = field(default_factory=list)


class Load:
    """Requests of one cell: each begins like some others and ends like none."""

    def __init__(self, options: SchedulerOptions, context_tokens: int) -> None:
        """Write the shared beginnings.

        Args:
            options: sizes.
            context_tokens: prompt tokens of each request.
        """
        self._options = options
        shared = (context_tokens - options.unique_tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        self._unique_tokens = context_tokens - shared
        self._documents = [
            [(document * 7919 + place * 104729) % _TOKEN_IDS for place in range(shared)]
            for document in range(DOCUMENTS)
        ]
        self._hashes = [block_hashes(document, BLOCK_TOKENS) for document in self._documents]
        self._numbers = itertools.count()

    def request(self, max_tokens: int | None) -> AddRequest:
        """Return the next request as the core gets it from its socket.

        Args:
            max_tokens: output tokens, or None for as many as the model's length allows.
        """
        number = next(self._numbers)
        document = number % DOCUMENTS
        # Of different lengths, so that blocks do not fill up all at once.
        tail_tokens = self._unique_tokens - number % BLOCK_TOKENS
        tail = [(number * 15485863 + place * 32452843) % _TOKEN_IDS for place in range(tail_tokens)]
        prompt = self._documents[document] + tail
        request = EngineRequest(
            request_id=RequestId(f"request-{number}-0123abcd:0"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number),
            # As the front end does it.
            block_hashes=block_hashes(prompt, BLOCK_TOKENS, known=self._hashes[document]),
        )
        event = decode_to_core(encode(AddRequest(request)))
        invariant(isinstance(event, AddRequest), "a request was decoded as something else")
        return event  # type: ignore[return-value]


class Cell:
    """A scheduler under one load."""

    def __init__(self, options: SchedulerOptions, context_tokens: int, *, arrivals: bool) -> None:
        """Make the scheduler and its load.

        Args:
            options: sizes.
            context_tokens: prompt tokens of each request.
            arrivals: whether requests end and others arrive all the time.
        """
        self._options = options
        self._arrivals = arrivals
        self._load = Load(options, context_tokens)
        outputs = _FIRST_OUTPUT_TOKENS + options.output_tokens if arrivals else options.steps + 4 * _WARMUP_STEPS
        longest = context_tokens + outputs + BLOCK_TOKENS
        own_blocks = (options.unique_tokens + outputs) // BLOCK_TOKENS + 3
        blocks = DOCUMENTS * (context_tokens // BLOCK_TOKENS + 1) + 3 * options.running * own_blocks
        layout = make_layout(
            [LayerCache(layer, FullAttentionSpec(2, 64, 64, 2)) for layer in range(2)],
            block_tokens=BLOCK_TOKENS,
            bytes_available=1 << 62,
            num_blocks_override=blocks,
            max_model_len=longest,
        )
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=options.running, max_num_batched_tokens=BUDGET_TOKENS),
            layout=layout,
            max_model_len=longest,
            enable_prefix_caching=True,
        )
        self._inbox: list[InboxEvent] = []

    def run(self) -> Samples:
        """Fill the scheduler, let it settle, and measure the steps."""
        options, kept = self._options, Samples()
        self._fill()
        collector = Collector()
        collector.settle(0.0)  # as in the core process
        try:
            for _ in range(_WARMUP_STEPS):
                self._step(Samples())
            for _ in range(options.steps):
                self._step(kept)
        finally:
            collector.close()
        return kept

    def _fill(self) -> None:
        """Start one request a document, so that the beginnings are cached, and then all the others."""
        options = self._options
        for number in range(options.running):
            if number == DOCUMENTS:
                while self._inbox or any(known.computed_tokens < known.prompt_tokens for known in self._pending()):
                    self._step(Samples())
            # Those that are there first end one after the other, as those that come later do.
            most = _FIRST_OUTPUT_TOKENS + number % options.output_tokens if self._arrivals else None
            self._inbox.append(self._load.request(most))
        while len(self._scheduler.running) < options.running or self._inbox:
            self._step(Samples())

    def _pending(self) -> list[Request]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _step(self, samples: Samples) -> None:
        """Do one step and note what it took."""
        inbox, self._inbox = self._inbox, []
        scheduler, clock, cpu_clock = self._scheduler, time.perf_counter_ns, time.thread_time_ns
        cpu_begun, begun = cpu_clock(), clock()
        plan = scheduler.schedule(inbox, 0.0)
        scheduled = clock()
        to_ranks = ENCODER.encode(Execute(plan))
        sent, cpu_sent = clock(), cpu_clock()
        result = _answer(plan)
        cpu_back, back = cpu_clock(), clock()
        news = scheduler.apply(plan, result, 0.0)
        applied = clock()
        to_front_end = encode(outputs_of([news], scheduler.stats()))
        ended, cpu_ended = clock(), cpu_clock()
        samples.parts["schedule"].append(scheduled - begun)
        samples.parts["apply"].append(applied - back)
        samples.parts["encode"].append(sent - scheduled + ended - applied)
        samples.wall.append(sent - begun + ended - back)
        samples.cpu.append(cpu_sent - cpu_begun + cpu_ended - cpu_back)
        samples.arrivals.append(len(plan.starts))
        samples.plan_bytes.append(len(to_ranks))
        samples.news_bytes.append(len(to_front_end))
        if self._arrivals:
            ended_requests = sum(delta.finish_reason is not None for delta in news.deltas)
            self._inbox += [self._load.request(self._options.output_tokens) for _ in range(ended_requests)]


def _answer(plan: StepPlan) -> StepResult:
    rows = [RowResult([_TOKEN] if row.sample else []) for row in plan.rows]
    return StepResult(plan.step, rows, [_TOKEN] * len(plan.decodes))


def calibrate() -> float:
    """Return microseconds of a fixed piece of Python: what this machine is worth, to compare figures of two.

    The best of 50 runs of 2,000 turns of a loop with a dictionary, a list and a tuple.
    """
    best = 1 << 62
    for _ in range(50):
        begun = time.perf_counter_ns()
        counts: Counter[int] = Counter()
        kept: list[tuple[int, int]] = []
        for turn in range(2000):
            key = turn * 31 & 255
            counts[key] = counts[key] + turn
            if key & 1:
                kept.append((key, turn))
        best = min(best, time.perf_counter_ns() - begun)
    return best / 1e3


def measure(options: SchedulerOptions, context_tokens: int, *, arrivals: bool) -> SchedulerCell:
    """Run one cell.

    Args:
        options: sizes.
        context_tokens: prompt tokens of each request.
        arrivals: whether requests end and others arrive all the time.
    """
    samples = Cell(options, context_tokens, arrivals=arrivals).run()

    def at(values: list[int], share: float, scale: float = 1e3) -> float:
        return percentile(sorted(values), share) / scale

    cell = SchedulerCell(
        context_tokens=context_tokens,
        arrivals_per_step=sum(samples.arrivals) / len(samples.arrivals),
        p50_us=at(samples.wall, 0.5),
        p99_us=at(samples.wall, 0.99),
        p50_cpu_us=at(samples.cpu, 0.5),
        p99_cpu_us=at(samples.cpu, 0.99),
        schedule_us=at(samples.parts["schedule"], 0.5),
        encode_us=at(samples.parts["encode"], 0.5),
        apply_us=at(samples.parts["apply"], 0.5),
        plan_bytes=at(samples.plan_bytes, 0.5, 1),
        news_bytes=at(samples.news_bytes, 0.5, 1),
    )
    say(
        f"{context_tokens:>8} tokens {cell.arrivals_per_step:>5.1f} arrivals a step: p50 {cell.p50_us:>8.0f} us, "
        f"p99 {cell.p99_us:>8.0f} us (CPU {cell.p50_cpu_us:.0f}, {cell.p99_cpu_us:.0f}); schedule "
        f"{cell.schedule_us:.0f}, encode {cell.encode_us:.0f}, apply {cell.apply_us:.0f}"
    )
    return cell


def run(options: SchedulerOptions) -> SchedulerReport:
    """Measure all cells and return the report."""
    before_us = calibrate()
    say(f"calibration {before_us:.0f} us; {options.running} running, {options.steps} steps a cell")
    cells = [
        measure(options, context_tokens, arrivals=arrivals)
        for context_tokens in (options.short_context_tokens, options.long_context_tokens)
        for arrivals in (False, True)
    ]
    return SchedulerReport(
        running=options.running,
        steps=options.steps,
        unique_tokens=options.unique_tokens,
        output_tokens=options.output_tokens,
        calibration_us=min(before_us, calibrate()),
        cells=cells,
        environment=environment(),
    )

"""``bench latency``: one batch at a time through the offline engine.

A decode step is (run with N output tokens - run with one) / (N - 1): prefill and the fixed cost of a call drop out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.bench.offline import OfflineEngine, random_prompts, token_range
from headrace.bench.report import LatencyReport, environment, say, show_percentiles, summarize
from headrace.config import EngineConfig
from headrace.config.option import option


@dataclass(frozen=True)
class LatencyOptions:
    """Latency of one batch."""

    batch_size: int = option(1, "Requests at once.", low=1)
    input_len: int = option(128, "Prompt tokens of each.", low=1)
    output_len: int = option(128, "Output tokens of each.", low=1)
    warmup_iterations: int = option(1, "Iterations that are not counted.", low=0)
    iterations: int = option(5, "Iterations that are counted.", low=1)
    bench_seed: int = option(0, "Seed of the prompts; each iteration has its own.")


def run(config: EngineConfig, options: LatencyOptions) -> LatencyReport:
    """Measure and return the report.

    Args:
        config: options of the engine.
        options: what to measure.

    Raises:
        HeadraceError: as `headrace.LLM`.
    """
    engine = OfflineEngine(config)
    try:
        ttft, step, e2e = _iterate(engine, options)
        facts = engine.facts()
    finally:
        engine.close()
    table = {"ttft_ms": summarize(ttft), "decode_ms_per_step": summarize(step), "e2e_ms": summarize(e2e)}
    show_percentiles(table)
    e2e_ms, step_ms = table["e2e_ms"].median, table["decode_ms_per_step"].median
    return LatencyReport(
        **facts,
        batch_size=options.batch_size,
        input_len=options.input_len,
        output_len=options.output_len,
        warmup_iterations=options.warmup_iterations,
        iterations=options.iterations,
        ttft_ms=table["ttft_ms"].median,
        decode_ms_per_step=step_ms,
        e2e_ms=e2e_ms,
        tokens_per_s=options.batch_size * options.output_len / (e2e_ms / 1e3),
        decode_tokens_per_s=options.batch_size / (step_ms / 1e3) if step_ms > 0 else 0.0,
        percentiles=table,
        environment=environment(),
    )


def _iterate(engine: OfflineEngine, options: LatencyOptions) -> tuple[list[float], list[float], list[float]]:
    """Return milliseconds of each counted iteration: first token, decode step, whole run."""
    source = random.Random(f"latency {options.bench_seed}")
    lens, token_ids = [options.input_len] * options.batch_size, token_range(engine.llm)
    ttft, step, e2e = [], [], []
    for iteration in range(options.warmup_iterations + options.iterations):
        first_s, _ = engine.generate(random_prompts(lens, token_ids, source), [1] * options.batch_size)
        whole_s = first_s
        if options.output_len > 1:
            whole_s, _ = engine.generate(
                random_prompts(lens, token_ids, source), [options.output_len] * options.batch_size
            )
        counted = iteration >= options.warmup_iterations
        say(
            f"{'iteration' if counted else 'warm-up'}: first token {first_s * 1e3:.2f} ms, whole {whole_s * 1e3:.2f} ms"
        )
        if counted:
            ttft.append(first_s * 1e3)
            e2e.append(whole_s * 1e3)
            if options.output_len > 1:
                step.append((whole_s - first_s) * 1e3 / (options.output_len - 1))
    return ttft, step, e2e

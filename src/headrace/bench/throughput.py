"""``bench throughput``: all requests at once through the offline engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.bench.load import lengths
from headrace.bench.offline import OfflineEngine, random_prompts, token_range
from headrace.bench.report import ThroughputReport, environment, say
from headrace.config import EngineConfig
from headrace.config.option import option


@dataclass(frozen=True)
class ThroughputOptions:
    """Throughput of many requests."""

    num_prompts: int = option(64, "Requests.", low=1)
    input_len: int = option(128, "Prompt tokens of each.", low=1)
    output_len: int = option(128, "Output tokens of each.", low=1)
    lengths: str = option("fixed", "mixed: lognormal lengths like chat traffic.", choices=("fixed", "mixed"))
    warmup_requests: int = option(1, "Short requests before the run that are not counted.", low=0)
    bench_seed: int = option(0, "Seed of lengths and prompts.")


def run(config: EngineConfig, options: ThroughputOptions) -> ThroughputReport:
    """Measure and return the report.

    Args:
        config: options of the engine.
        options: what to measure.

    Raises:
        HeadraceError: as `headrace.LLM`.
    """
    engine = OfflineEngine(config)
    try:
        source = random.Random(f"throughput {options.bench_seed}")
        token_ids = token_range(engine.llm)
        if options.warmup_requests:
            engine.generate(
                random_prompts([16] * options.warmup_requests, token_ids, source), [4] * options.warmup_requests
            )
        pairs = lengths(options.lengths, options.num_prompts, options.input_len, options.output_len, options.bench_seed)
        prompts = random_prompts([inputs for inputs, _ in pairs], token_ids, source)
        elapsed_s, output_tokens = engine.generate(prompts, [outputs for _, outputs in pairs])
        facts = engine.facts()
    finally:
        engine.close()
    input_tokens = sum(inputs for inputs, _ in pairs)
    say(f"{options.num_prompts} requests in {elapsed_s:.2f} s: {output_tokens / elapsed_s:.1f} output tokens/s")
    return ThroughputReport(
        **facts,
        num_prompts=options.num_prompts,
        lengths=options.lengths,
        seed=options.bench_seed,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        elapsed_s=elapsed_s,
        requests_per_s=options.num_prompts / elapsed_s,
        output_tokens_per_s=output_tokens / elapsed_s,
        total_tokens_per_s=(input_tokens + output_tokens) / elapsed_s,
        environment=environment(),
    )

"""Microseconds of `schedule` + `apply` for one step of running decodes, without model, device or sockets.

    python benchmarks/scheduler_step.py [--running 256] [--context-tokens 512]

Prints the median and the 99th percentile over steps in which every request decodes one token.
"""

from __future__ import annotations

import argparse
import time

from headrace import SamplingParams
from headrace.config import SchedulerConfig
from headrace.kv.budget import fixed_layout
from headrace.sched.scheduler import Scheduler
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
from headrace.types.events import AddRequest, InboxEvent
from headrace.types.requests import EngineRequest
from headrace.types.results import RowResult, StepResult

STEPS = 400
BLOCK_TOKENS = 16


def main() -> None:
    """Run the steps and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context-tokens", type=int, default=512)
    options = parser.parse_args()
    running, context = options.running, options.context_tokens
    blocks = running * (context + STEPS + 2 * BLOCK_TOKENS) // BLOCK_TOKENS + 2
    spec = FullAttentionSpec(kv_heads=2, key_dim=64, value_dim=64, dtype_bytes=2)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=65536),
        layout=fixed_layout(
            [LayerCache(0, spec), LayerCache(1, spec)], block_tokens=BLOCK_TOKENS, usable_blocks=blocks - 1
        ),
        max_model_len=context + STEPS + BLOCK_TOKENS,
        enable_prefix_caching=True,
    )
    sampling = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
    inbox: list[InboxEvent] = [
        AddRequest(
            EngineRequest(
                request_id=f"r{index}",  # type: ignore[arg-type]
                prompt_token_ids=[(index * 7919 + place) % 5000 for place in range(context - index % BLOCK_TOKENS)],
                sampling=sampling,
            )
        )
        for index in range(running)
    ]
    spent_us: list[float] = []
    for step in range(STEPS):
        begun = time.perf_counter()
        plan = scheduler.schedule(inbox, 0.0)
        planned = time.perf_counter()
        inbox = []
        result = StepResult(plan.step, [RowResult([step % 1000] if row.sample else []) for row in plan.rows])
        ready = time.perf_counter()
        scheduler.apply(plan, result, 0.0)
        if plan.total_tokens == len(plan.rows) == running:
            spent_us.append((planned - begun + time.perf_counter() - ready) * 1e6)
    spent_us.sort()
    p50, p99 = spent_us[len(spent_us) // 2], spent_us[int(len(spent_us) * 0.99)]
    print(f"{running} running, {context} tokens of context: p50 {p50:.0f} us, p99 {p99:.0f} us, {len(spent_us)} steps")


if __name__ == "__main__":
    main()

"""Random runs: each seed draws a subset of features and extreme sizes, and then a random course of events.

Everything comes from the seed; the same seed gives the same run on every machine.
"""

from __future__ import annotations

import random
from collections import Counter
from math import lcm

from sim_harness import Harness, SimSetup, sim_layout
from sim_oracle import expected_output

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import capacity_tokens
from headrace.kv.prefix_hash import block_hashes
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams


def draw_setup(rng: random.Random) -> SimSetup:
    """Draw sizes and options. Pools are tiny, so that blocks run out and are evicted all the time."""
    block_tokens = rng.choice([1, 2, 2, 3, 4])
    blocks = [(block_tokens, rng.randint(4, 16))]
    if rng.random() < 0.3:
        blocks.append((block_tokens * rng.choice([1, 1, 2]), rng.randint(4, 16)))
    layout = sim_layout(blocks)
    seqs = rng.choice([1, 2, 3, 4, 4, 5, 6])
    capacity = capacity_tokens(layout)
    over = rng.choice([0, 0, 0, 1, 5])
    return SimSetup(
        SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.choice([0, 1, 3, 8, 100]),
            max_queue=rng.choice([1, 100, 100, 100, 100, 100]),
            policy=rng.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3, 8]),
            watermark=rng.choice([0.0, 0.0, 0.01, 0.1, 0.4]),
            steps_in_flight=rng.choice([1, 2]),
        ),
        layout,
        max_model_len=max(2, rng.randint(capacity // 2, capacity) + over),
        vocab_tokens=rng.choice([2, 3, 3, 5]),
        enable_prefix_caching=rng.random() < 0.85,
    )


class RequestSource:
    """Draws requests whose prompts share a trunk."""

    def __init__(self, rng: random.Random, setup: SimSetup, hash_tokens: int) -> None:
        self._rng, self._setup, self._hash_tokens = rng, setup, hash_tokens
        self._trunk = [rng.randrange(setup.vocab_tokens) for _ in range(setup.max_model_len)]
        self._salts = rng.choice([[None], [None], [None, "a", "b"], ["", None, "a"]])
        self._made = 0

    def draw(self, now_s: float) -> EngineRequest:
        rng, vocab, longest = self._rng, self._setup.vocab_tokens, self._setup.max_model_len
        trunk_tokens = rng.randint(0, longest - 1) if rng.random() < 0.5 else rng.randint(0, longest // 4)
        prompt = self._trunk[:trunk_tokens] + [rng.randrange(vocab) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.95:
            prompt = (prompt or [0])[: longest - 1]
        most = rng.choice([1, 2, 5, 12, 12, 30, 30, None])
        sampling = SamplingParams(
            max_tokens=most,
            min_tokens=rng.choice([0, 0, min(3, most or 3), most or 5]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.choice([[], [], [rng.randrange(vocab)]]),
            prompt_logprobs=rng.choice([None] * 5 + [0]),
            seed=1,
        )
        salt = rng.choice(self._salts)
        hashes = block_hashes(prompt, self._hash_tokens, salt=salt)
        self._made += 1
        source = EngineRequest(
            request_id=RequestId(f"r{self._made}"),
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=[vocab - 1] if rng.random() < 0.7 else [],
            arrival_s=now_s,
            priority=rng.randint(-1, 2),
            cache_salt=salt,
            block_hashes=hashes[: rng.choice([0, 1, len(hashes), len(hashes)])],
        )
        return self._resubmitted(source) if prompt and rng.random() < 0.1 else source

    def _resubmitted(self, source: EngineRequest) -> EngineRequest:
        """Return the request as it comes back after a crash, with a beginning of its output."""
        setup = self._setup
        full = expected_output(source, vocab_tokens=setup.vocab_tokens, max_model_len=setup.max_model_len).output_ids
        produced = full[: self._rng.randint(0, len(full))]
        fields = {name: getattr(source, name) for name in source.__struct_fields__}
        return EngineRequest(**(fields | {"produced_token_ids": produced}))


def run_seed(seed: int) -> Counter[str]:
    """Run one random course of events to its end, checking after each step.

    Returns:
        How often interesting things happened.

    Raises:
        SimFault: an invariant is broken or an output is wrong.
    """
    rng = random.Random(seed)
    setup = draw_setup(rng)
    harness = Harness(setup)
    alignment = lcm(*(group.block_tokens for group in setup.layout.groups))
    source = RequestSource(rng, setup, harness.scheduler.hash_block_tokens)
    left = rng.randint(3, 20)
    arrival, abort, reset = rng.choice([0.1, 0.5, 0.9, 0.9]), rng.choice([0.0, 0.05, 0.2]), rng.choice([0.0, 0.0, 0.05])
    fault = rng.choice([0.0, 0.0, 0.2])
    while left:
        if rng.random() < arrival:
            for _ in range(rng.randint(1, min(4, left))):
                left -= 1
                harness.add(source.draw(harness.now_s), rng.randint(0, 4) if rng.random() < fault else None)
        live = harness.live_ids()
        if live and rng.random() < abort:
            harness.abort(rng.choice(live))
        if rng.random() < reset:
            harness.reset_prefix_cache()
        if harness.in_flight_steps < setup.scheduler.steps_in_flight:
            harness.schedule()
        if rng.random() < 0.5:
            harness.execute()
        if harness.in_flight_steps and (setup.scheduler.steps_in_flight == 1 or rng.random() < 0.7):
            harness.apply()
    harness.drain()
    harness.counts["two block sizes"] += alignment != harness.scheduler.hash_block_tokens
    return harness.counts

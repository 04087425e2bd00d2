"""Resident memory of a busy engine is flat: the same work again takes no more of it."""

from __future__ import annotations

import random

import psutil

from headrace import LLM, SamplingParams
from headrace.platforms.heap import find_trim

ROUNDS, WARM_ROUNDS = 9, 4
REQUESTS = 32


def _round(llm: LLM, rng: random.Random) -> None:
    prompts = [[rng.randrange(100, 40000) for _ in range(rng.randint(4, 100))] for _ in range(REQUESTS)]
    sampling = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            logprobs=rng.choice([None, 2]),
            max_tokens=rng.randint(2, 10),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    llm.generate(prompts, sampling, use_tqdm=False)


def test_resident_memory_is_flat_over_rounds_of_the_same_work() -> None:
    trim, process = find_trim(), psutil.Process()
    readings_mib: list[float] = []
    with LLM(model="default", max_model_len=256, kv_cache_memory_bytes=16 << 20) as llm:
        for index in range(ROUNDS):
            _round(llm, random.Random(index))
            trim()
            readings_mib.append(process.memory_info().rss / 2**20)
        blocks = llm.stats()
    assert blocks.blocks_free == blocks.blocks_total
    growth_mib = readings_mib[-1] - max(readings_mib[:WARM_ROUNDS])
    assert growth_mib < 6, f"resident MiB after each round: {[round(value) for value in readings_mib]}"

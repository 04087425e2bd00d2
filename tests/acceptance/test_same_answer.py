"""Greedy output in fp32 is bitwise the same alone, in a batch, under preemption and with prefix hits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from smollm2_samples import PROMPTS

from headrace import LLM, SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0)


def _answers(llm: Any, prompts: list[str]) -> list[tuple[list[int], list[float]]]:
    results = llm.generate(prompts, SAMPLING, use_tqdm=False)
    return [(list(r.outputs[0].token_ids), [e.logprob for e in r.outputs[0].logprobs]) for r in results]


@pytest.fixture(scope="module")
def uncached_llm() -> Iterator[Any]:
    """The engine without prefix caching."""
    with LLM(
        model="default", dtype="float32", quantization="none", max_model_len=1024, enable_prefix_caching=False
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(uncached_llm: Any) -> list[tuple[list[int], list[float]]]:
    """Each prompt by itself, without prefix caching."""
    return [_answers(uncached_llm, [prompt])[0] for prompt in PROMPTS]


def test_in_a_batch_of_20(exact_llm: Any, alone: list[Any]) -> None:
    assert _answers(exact_llm, PROMPTS) == alone


def test_with_prefix_hits(exact_llm: Any, uncached_llm: Any) -> None:
    trunk = " ".join(f"Fact {i}: the number {i} follows {i - 1}." for i in range(1, 12)) + "\n"
    prompts = [trunk + prompt for prompt in PROMPTS[:3]]
    expected = [_answers(uncached_llm, [prompt])[0] for prompt in prompts]
    assert _answers(exact_llm, prompts) == expected
    assert all(result.num_cached_tokens > 0 for result in exact_llm.generate(prompts, SAMPLING, use_tqdm=False))
    assert _answers(exact_llm, prompts) == expected, "whole prompts come from the cache"


def test_under_forced_preemption_and_small_chunks(alone: list[Any]) -> None:
    with LLM(
        model="default", dtype="float32", quantization="none", max_model_len=128, num_blocks_override=16,
        max_num_batched_tokens=24, max_num_seqs=20, watermark=0.0,
    ) as llm:  # fmt: skip
        assert _answers(llm, PROMPTS) == alone
        assert llm.stats().preemptions > 0, "the pool was meant to be too small"

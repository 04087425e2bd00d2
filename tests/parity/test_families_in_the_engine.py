"""The three families through scheduler, KV memory and worker: as transformers after preemption and after prefix hits.

Each model is written as a checkpoint and served by the offline class with a tiny cache. The answer of a request alone,
without prefix caching, is held against transformers; all others against that one, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_models import oracle_logits, random_ids, reference

from headrace import LLM, SamplingParams

TOLERANCE = 1e-4
CASES = ("gemma3", "llama4", "qwen3_next")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=20)
LONGER = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=20)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "quantization": "none", "max_model_len": 256, "cpu_threads": 1, "max_num_batched_tokens": 48,
    "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20,
}  # fmt: skip
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((70, 33, 5, 90, 16, 48))]


@dataclass(frozen=True)
class Answer:
    """Tokens of a request, and the likeliest tokens of each step with their log-probabilities."""

    tokens: list[int]
    steps: list[dict[int, float]]


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A case, and its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    reference(request.param).save_pretrained(folder)
    return request.param, folder


def answer_of(result: Any) -> Answer:
    output = result.outputs[0]
    steps = [
        {entry.token_id: entry.logprob} | {other: logprob for other, _, _, logprob in entry.top}
        for entry in output.logprobs
    ]
    return Answer(list(output.token_ids), steps)


def answers(llm: Any, prompts: list[list[int]], sampling: SamplingParams = SAMPLING) -> list[Answer]:
    return [answer_of(result) for result in llm.generate(prompts, sampling, use_tqdm=False)]


def small_memory(case: str) -> dict[str, Any]:
    """Options with room for one request of 112 tokens, and not for six."""
    size = {"gemma3": 240 << 10, "llama4": 115 << 10, "qwen3_next": 120 << 10}[case]
    return {"kv_cache_memory_bytes": size, "max_model_len": 112, "watermark": 0.0}


@pytest.fixture(scope="module")
def alone(served: tuple[str, Path]) -> Iterator[Callable[..., Answer]]:
    """Each request by itself, without prefix caching; computed once."""
    kept: dict[tuple[int, ...], Answer] = {}
    with LLM(str(served[1]), enable_prefix_caching=False, **OPTIONS) as llm:

        def answer(prompt: list[int], sampling: SamplingParams = SAMPLING) -> Answer:
            key = (sampling.max_tokens or 0, *prompt)
            if key not in kept:
                kept[key] = answers(llm, [prompt], sampling)[0]
            return kept[key]

        yield answer


def check_oracle(case: str, prompt: list[int], answer: Answer) -> None:
    rows = oracle_logits(reference(case), prompt + answer.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    for row, step in zip(rows, answer.steps, strict=True):
        for token, logprob in step.items():
            assert abs(float(row[token]) - logprob) <= TOLERANCE


def test_alone(served: tuple[str, Path], alone: Callable[..., Answer]) -> None:
    for prompt in PROMPTS:
        check_oracle(served[0], prompt, alone(prompt))


def test_in_a_batch(served: tuple[str, Path], alone: Callable[..., Answer]) -> None:
    with LLM(str(served[1]), **OPTIONS) as llm:
        assert answers(llm, PROMPTS) == [alone(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(served: tuple[str, Path], alone: Callable[..., Answer], caching: bool) -> None:
    """Short prompts are let in together, and outgrow the memory."""
    case, folder = served
    prompts = [random_ids(length, 20 + length) for length in (18, 7, 30, 12, 25, 20)]
    with LLM(str(folder), enable_prefix_caching=caching, **OPTIONS | small_memory(case)) as llm:
        assert answers(llm, prompts, LONGER) == [alone(prompt, LONGER) for prompt in prompts]
        assert llm.stats().preemptions > 0, "the memory was meant to be too small"


def test_after_a_prefix_hit(served: tuple[str, Path], alone: Callable[..., Answer]) -> None:
    trunk = random_ids(70, 40)
    prompts = [trunk + random_ids(5, 41), trunk + random_ids(9, 42), trunk + random_ids(5, 41), trunk[:50]]
    with LLM(str(served[1]), **OPTIONS) as llm:
        hits = []
        for prompt in prompts:
            result = llm.generate(prompt, SAMPLING, use_tqdm=False)[0]
            hits.append(result.num_cached_tokens)
            assert answer_of(result) == alone(prompt)
        # The state of the recurrent layers is kept at the last boundary of a prompt, so not at 48 of the first one.
        assert hits == [0, 64, 64, 0 if served[0] == "qwen3_next" else 48]


def test_after_a_hit_at_a_boundary_that_two_prompts_share(
    served: tuple[str, Path], alone: Callable[..., Answer]
) -> None:
    """A recurrent layer keeps nothing at 32 of the first prompt; the second one leaves a state there for the third."""
    trunk = random_ids(40, 50)
    with LLM(str(served[1]), **OPTIONS) as llm:
        hits = []
        for seed in (51, 52, 53):
            prompt = trunk + random_ids(50, seed)
            result = llm.generate(prompt, SAMPLING, use_tqdm=False)[0]
            hits.append(result.num_cached_tokens)
            assert answer_of(result) == alone(prompt)
        assert hits == [0, 0 if served[0] == "qwen3_next" else 32, 32]


def test_after_a_hit_in_the_middle_of_a_block(served: tuple[str, Path], alone: Callable[..., Answer]) -> None:
    trunk = random_ids(70, 60)
    with LLM(str(served[1]), prefix_hash_tokens=4, **OPTIONS) as llm:
        first, second = (llm.generate(p, SAMPLING, use_tqdm=False)[0] for p in (trunk, trunk + random_ids(6, 61)))
        assert second.num_cached_tokens == 68, "a part of the fifth block of 16"
        assert answer_of(first) == alone(trunk)
        assert answer_of(second) == alone(trunk + random_ids(6, 61))


def test_after_hits_in_a_crowd(served: tuple[str, Path], alone: Callable[..., Answer]) -> None:
    """Hits, evictions and preemptions at once, twice over."""
    case, folder = served
    trunk = random_ids(35, 70)
    prompts = [trunk + random_ids(1 + 3 * seed, 71 + seed) for seed in range(6)]
    with LLM(str(folder), **OPTIONS | small_memory(case)) as llm:
        wanted = [alone(prompt, LONGER) for prompt in prompts]
        assert answers(llm, prompts, LONGER) == wanted
        assert answers(llm, prompts, LONGER) == wanted
        assert llm.stats().prefix_hit_tokens > 0
        assert llm.stats().preemptions > 0


@pytest.mark.slow
def test_on_two_ranks(served: tuple[str, Path]) -> None:
    case, folder = served
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        for _ in range(2):
            for prompt, answer in zip(PROMPTS, answers(llm, PROMPTS), strict=True):
                check_oracle(case, prompt, answer)

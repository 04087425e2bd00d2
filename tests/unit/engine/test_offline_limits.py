"""Time limits and shared prefills of the offline class, on the fake device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeExecutor, expected_tokens

from headrace import LLM, SamplingParams
from headrace.base.errors import RequestError, RequestTimeoutError
from headrace.kv.prefix_hash import block_hashes, root_of

Make = Callable[..., LLM]
PROMPT = [97 + number % 26 for number in range(500)]


@pytest.fixture
def make_llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        monkeypatch.setattr("headrace.llm.make_executor", lambda *args: FakeExecutor())
        defaults = {"block_size": 16, "num_blocks_override": 256, "load_format": "dummy", "max_num_seqs": 8}
        made.append(LLM(str(model_dir), **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_a_prompt_out_of_time_is_an_error_and_leaves_a_usable_engine(make_llm: Make) -> None:
    llm = make_llm()
    sampling = SamplingParams(max_tokens=4)
    with pytest.raises(RequestTimeoutError) as caught:
        llm.generate(["abc"] * 3, sampling, use_tqdm=False, timeout_s=1e-9)
    assert caught.value.http_status == 504
    (result,) = llm.generate("abc", sampling, use_tqdm=False, timeout_s=600.0)
    assert result.outputs[0].token_ids == expected_tokens(list(b"abc"), 4)
    assert llm.stats().running == llm.stats().waiting == 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_time_limit_is_positive(make_llm: Make, value: float) -> None:
    with pytest.raises(RequestError, match="timeout_s must be above 0"):
        make_llm().generate("abc", use_tqdm=False, timeout_s=value)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_four_answers_compute_their_prompt_once(make_llm: Make, steps_in_flight: int) -> None:
    llm = make_llm(steps_in_flight=steps_in_flight)
    (result,) = llm.generate([PROMPT], SamplingParams(n=4, max_tokens=5, temperature=0.0), use_tqdm=False)
    assert [output.token_ids for output in result.outputs] == [expected_tokens(PROMPT, 5)] * 4
    stats = llm.stats()
    assert stats.prefix_query_tokens == 4 * 500
    # Each sibling computes the tokens behind the last whole block by itself.
    assert stats.prefix_hit_tokens == 3 * (500 // 16 * 16)


def test_cached_prefixes_are_known_to_all_who_have_the_seed(make_llm: Make) -> None:
    llm = make_llm(prefix_hash_seed="shared by a fleet")
    for _ in range(2):
        (result,) = llm.generate([PROMPT], SamplingParams(max_tokens=3), use_tqdm=False)
    assert result.num_cached_tokens == 500 // 16 * 16
    cached = llm._require_core()._require_scheduler().kv.memory.pools[0].cached_hashes()
    assert set(block_hashes(PROMPT, 16, root=root_of("shared by a fleet"))) <= cached
    assert cached.isdisjoint(block_hashes(PROMPT, 16))


def test_siblings_do_not_wait_for_nothing_without_a_cache(make_llm: Make) -> None:
    llm = make_llm(enable_prefix_caching=False)
    (result,) = llm.generate([PROMPT], SamplingParams(n=4, max_tokens=5, temperature=0.0), use_tqdm=False)
    assert [output.token_ids for output in result.outputs] == [expected_tokens(PROMPT, 5)] * 4


def test_siblings_go_on_when_their_leader_has_ended_or_cannot_share(make_llm: Make) -> None:
    llm = make_llm(max_num_seqs=1, max_queue=1)
    # The first answer of each prompt is done before the second is even posted.
    results = llm.generate([PROMPT, PROMPT[:40]], SamplingParams(n=3, max_tokens=1), use_tqdm=False)
    assert all(output.finish_reason == "length" for result in results for output in result.outputs)
    scored = SamplingParams(n=3, max_tokens=1, prompt_logprobs=0)
    (result,) = llm.generate([PROMPT], scored, use_tqdm=False)
    assert len(result.prompt_logprobs or []) == 500

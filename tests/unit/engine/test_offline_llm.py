"""The offline class on the fake device."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import NAN, FakeExecutor, expected_text, expected_tokens

from headrace import LLM, SamplingParams
from headrace.base.errors import (
    ConfigError,
    ContextLengthError,
    EngineUnavailableError,
    NumericalError,
    RequestError,
    WeightLoadError,
)

Make = Callable[..., LLM]


@pytest.fixture
def make_llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[LLM] = []

    def make(executor: FakeExecutor | None = None, **options: Any) -> LLM:
        monkeypatch.setattr("headrace.llm.make_executor", lambda *args: executor or FakeExecutor())
        defaults = {"block_size": 8, "num_blocks_override": 64, "load_format": "dummy", "max_num_seqs": 4}
        made.append(LLM(str(model_dir), **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_results_come_in_the_order_of_the_prompts(make_llm: Make) -> None:
    llm = make_llm(max_num_batched_tokens=16)
    prompts = [f"prompt {number}" * (1 + number % 3) for number in range(30)]
    sampling = [SamplingParams(max_tokens=1 + (7 * number) % 40) for number in range(30)]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    for prompt, parameters, result in zip(prompts, sampling, results, strict=True):
        assert result.prompt == prompt
        assert result.outputs[0].text == expected_text(prompt.encode(), parameters.max_tokens or 0)
        assert result.outputs[0].finish_reason == "length"
        assert result.finished


def test_more_prompts_than_the_queue_takes(make_llm: Make) -> None:
    llm = make_llm(max_queue=3)
    results = llm.generate([[97, 10 + n] for n in range(40)], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [r.outputs[0].token_ids for r in results] == [expected_tokens([97, 10 + n], 3) for n in range(40)]


def test_forms_of_prompts(make_llm: Make) -> None:
    llm = make_llm()
    sampling = SamplingParams(max_tokens=4)
    ids = list(b"abc")
    expected = expected_tokens(ids, 4)
    for prompts in ("abc", ids, ["abc"], [ids], {"prompt_token_ids": ids}, [{"prompt": "abc", "cache_salt": "x"}]):
        (result,) = llm.generate(prompts, sampling, use_tqdm=False)
        assert result.prompt_token_ids == ids
        assert result.outputs[0].token_ids == expected
    assert llm.generate([], sampling, use_tqdm=False) == []


def test_arrays_of_token_ids(make_llm: Make) -> None:
    llm = make_llm()
    ids = np.array(list(b"abc"))
    for prompts in (ids, [ids], ids[None], [list(ids)], {"prompt_token_ids": ids}):
        (result,) = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
        assert result.prompt_token_ids == list(b"abc")
        assert result.outputs[0].token_ids == expected_tokens(list(b"abc"), 4)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a list, got NoneType"),
        (5, "prompts must be a list, got int"),
        (b"abc", "prompt 0: a prompt is a text or a list of token ids, got bytes"),
        (["a", None], "prompt 1: a prompt is a text or a list of token ids, got NoneType"),
        ([[True]], "prompt 0: the prompt has True"),
        ([{"text": "a"}], "prompt 0: unknown prompt keys"),
    ],
)
def test_what_is_no_prompt(make_llm: Make, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_llm().generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, "greedy", [None], 5])
def test_what_are_no_sampling_params(make_llm: Make, sampling: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params must be"):
        make_llm().generate("a", sampling, use_tqdm=False)


@pytest.mark.parametrize("messages", ["hi", [5], [{"content": "hi"}], [[{"role": "user"}, "hi"]], [["hi"]]])
def test_what_is_no_conversation(make_llm: Make, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"conversation 0.* must be a (list|mapping)"):
        make_llm().chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)


def test_n_logprobs_and_cached_tokens(make_llm: Make) -> None:
    llm = make_llm()
    sampling = SamplingParams(n=3, max_tokens=5, logprobs=1, prompt_logprobs=0)
    (result,) = llm.generate("a prompt that is long enough to be cached", sampling, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    for output in result.outputs:
        assert output.logprobs is not None
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    (again,) = llm.generate("a prompt that is long enough to be cached", SamplingParams(max_tokens=1), use_tqdm=False)
    assert again.num_cached_tokens >= 32
    llm.reset_prefix_cache()
    (fresh,) = llm.generate("a prompt that is long enough to be cached", SamplingParams(max_tokens=1), use_tqdm=False)
    assert fresh.num_cached_tokens == 0


def test_stop_string_ends_one_request_and_frees_it(make_llm: Make) -> None:
    llm = make_llm()
    whole = expected_text(b"abc", 60)
    stop = whole[10:12]
    (result,) = llm.generate("abc", SamplingParams(max_tokens=60, stop=[stop]), use_tqdm=False)
    assert result.outputs[0].text == whole[: whole.index(stop)]
    assert result.outputs[0].stop_reason == stop
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.stats().running == 0
    assert llm.stats().blocks_free == llm.stats().blocks_total


def test_chat_uses_the_template(make_llm: Make) -> None:
    llm = make_llm()
    message = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(message, SamplingParams(max_tokens=4), use_tqdm=False)
    assert one.prompt == "user: hi\nassistant:"
    two = llm.chat([message, message], SamplingParams(max_tokens=4), use_tqdm=False)
    assert [result.outputs[0].text for result in two] == [one.outputs[0].text] * 2
    (own,) = llm.chat(message, SamplingParams(max_tokens=1), False, chat_template="<{{ messages[0].content }}>")
    assert own.prompt == "<hi>"


def test_errors_come_before_anything_runs(make_llm: Make) -> None:
    executor = FakeExecutor()
    llm = make_llm(executor)
    with pytest.raises(ContextLengthError, match=r"prompt 1: .*512"):
        llm.generate(["fine", [97] * 600], SamplingParams(max_tokens=5), use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="unknown prompt keys"):
        llm.generate([{"text": "a"}], SamplingParams(), use_tqdm=False)
    assert executor.submitted == []


def test_a_failed_request_leaves_a_usable_engine(make_llm: Make) -> None:
    llm = make_llm()
    with pytest.raises(NumericalError):
        llm.generate(["fine", [97, NAN]], SamplingParams(max_tokens=50), use_tqdm=False)
    assert llm.stats().blocks_free == llm.stats().blocks_total
    (result,) = llm.generate("abc", SamplingParams(max_tokens=5), use_tqdm=False)
    assert result.outputs[0].token_ids == expected_tokens(b"abc", 5)


def test_ctrl_c_aborts_between_steps(make_llm: Make) -> None:
    executor = FakeExecutor()
    llm = make_llm(executor)
    collect = executor.collect

    def interrupted() -> Any:
        if len(executor.submitted) == 3:
            signal.raise_signal(signal.SIGINT)
        return collect()

    executor.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 10, SamplingParams(max_tokens=50), use_tqdm=False)
    assert len(executor.submitted) <= 5
    assert llm.stats().blocks_free == llm.stats().blocks_total
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (result,) = llm.generate("abc", SamplingParams(max_tokens=5), use_tqdm=False)
    assert result.outputs[0].token_ids == expected_tokens(b"abc", 5)


def test_a_broken_device_is_told_again(make_llm: Make) -> None:
    executor = FakeExecutor()
    llm = make_llm(executor)

    def gone() -> Any:
        raise RuntimeError("device gone")

    executor.collect = gone  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device gone"):
        llm.generate("abc", use_tqdm=False)
    with pytest.raises(EngineUnavailableError, match="device gone"):
        llm.generate("abc", use_tqdm=False)


def test_close_and_context_manager(make_llm: Make) -> None:
    executor = FakeExecutor()
    with make_llm(executor) as llm:
        assert llm.vocab_tokens == 258
        assert llm.max_model_len == 512
        assert llm.tokenizer is not None
    assert executor.closed
    with pytest.raises(EngineUnavailableError, match="closed"):
        llm.generate("abc")


def test_options(make_llm: Make) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        make_llm(max_modellen=3)
    with pytest.raises(ConfigError, match="max-num-seqs"):
        make_llm(max_num_seqs=0)
    with pytest.raises(ConfigError, match="at least --max-num-seqs"):
        make_llm(max_num_batched_tokens=2)


def test_a_failed_load_closes_and_raises(make_llm: Make) -> None:
    executor = FakeExecutor()

    def broken() -> Any:
        raise WeightLoadError("tensor x is missing")

    executor.start = broken  # type: ignore[method-assign]
    with pytest.raises(WeightLoadError, match="tensor x"):
        make_llm(executor)
    assert executor.closed


def test_progress_bar_goes_to_standard_error(make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "2/2" in err.getvalue()
    assert out.getvalue() == ""

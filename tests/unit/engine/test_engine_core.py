from __future__ import annotations

from typing import Any

import pytest
from fake_device import NAN, FakeExecutor, engine_config, expected_tokens

from headrace.base.clock import ManualClock
from headrace.base.errors import ConfigError, InsufficientMemoryError
from headrace.base.ids import RequestId
from headrace.engine.core import EngineCore
from headrace.types.events import AbortRequest, AddRequest
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams


def _core(executor: FakeExecutor | None = None, record: Any = None, **options: Any) -> EngineCore:
    core = EngineCore(engine_config("m", **options), executor or FakeExecutor(), ManualClock(), record=record)
    core.start()
    return core


def _add(core: EngineCore, name: str, prompt: list[int], tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, seed=1)
    core.post(AddRequest(EngineRequest(request_id=RequestId(name), prompt_token_ids=prompt, sampling=sampling)))


def _run(core: EngineCore, most_steps: int = 2000) -> dict[str, list[RequestDelta]]:
    news: dict[str, list[RequestDelta]] = {}
    for _ in range(most_steps):
        if not core.has_work:
            return news
        for delta in core.step().each():
            news.setdefault(delta.request_id, []).append(delta)
    pytest.fail("the core never becomes idle")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_do_not_depend_on_batching_or_overlap(steps_in_flight: int) -> None:
    core = _core(steps_in_flight=steps_in_flight, blocks=24)
    prompts = {f"r{n}": [97 + n, 98, *range(99, 99 + 3 * n)] for n in range(12)}
    for name, prompt in prompts.items():
        _add(core, name, prompt, 10 + len(prompt))
    news = _run(core)
    for name, prompt in prompts.items():
        tokens = [token for delta in news[name] for token in delta.new_token_ids]
        assert tokens == expected_tokens(prompt, 10 + len(prompt))
        assert [delta.finish_reason for delta in news[name]][-1] is FinishReason.LENGTH
    stats = core.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.preemptions > 0, "the pool was meant to be too small"


def test_two_plans_are_submitted_before_the_first_result_is_applied() -> None:
    executor = FakeExecutor()
    core = _core(executor, steps_in_flight=2)
    _add(core, "r", [97], 5)
    assert core.step().deltas == []
    assert len(executor.submitted) == 1
    assert [delta.new_token_ids for delta in core.step().deltas] == [expected_tokens([97], 1)]
    assert len(executor.submitted) == 2


def test_an_abort_frees_within_one_step() -> None:
    core = _core()
    _add(core, "r", [97] * 40, 100)
    core.step()
    assert core.stats().blocks_free < core.stats().blocks_total
    core.post(AbortRequest(RequestId("r")))
    assert core.step().deltas == []
    assert core.stats().blocks_free == core.stats().blocks_total
    _run(core)


def test_a_failed_row_ends_its_request_only() -> None:
    core = _core()
    _add(core, "bad", [97, NAN], 5)
    _add(core, "good", [97, 98], 5)
    news = _run(core)
    assert news["bad"][-1].finish_reason is FinishReason.ERROR
    assert news["bad"][-1].error is not None
    assert news["bad"][-1].error.code == "non_finite_logits"
    assert [token for delta in news["good"] for token in delta.new_token_ids] == expected_tokens([97, 98], 5)


def test_the_recorder_hears_of_requests_before_they_are_touched() -> None:
    heard: list[set[str]] = []
    executor = FakeExecutor()
    collect = executor.collect

    def crash_after_one_step() -> Any:
        if len(executor.submitted) == 2:
            raise RuntimeError("device gone")
        return collect()

    executor.collect = crash_after_one_step  # type: ignore[method-assign]
    core = _core(executor, record=lambda ids: heard.append(set(ids)))
    _add(core, "first", [97], 5)
    core.step()
    _add(core, "second", [98], 5)
    with pytest.raises(RuntimeError, match="device gone"):
        core.step()
    assert {"second"} in heard, "told on arrival"
    assert heard[-1] == {"first", "second"}


def test_length_is_clamped_to_the_cache_unless_asked_for() -> None:
    core = EngineCore(engine_config("m", blocks=4), FakeExecutor(), ManualClock())
    assert core.start().max_model_len == 32
    config = engine_config("m", blocks=4)
    wanted = EngineCore(_with_length(config, 33), FakeExecutor(), ManualClock())
    with pytest.raises(InsufficientMemoryError, match=r"holds 32 tokens.*--max-model-len to 32"):
        wanted.start()
    assert EngineCore(_with_length(config, 20), FakeExecutor(), ManualClock()).start().max_model_len == 20
    with pytest.raises(ConfigError, match="2048 positions"):
        EngineCore(_with_length(config, 2049), FakeExecutor(), ManualClock()).start()


def _with_length(config: Any, length: int) -> Any:
    import dataclasses

    return dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=length))


def test_too_little_memory_has_numbers() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"\d+ bytes.*--kv-cache-memory-bytes"):
        EngineCore(engine_config("m", blocks=None), FakeExecutor(cache_bytes=100), ManualClock()).start()


def test_startup_rows_are_in_the_ready_message() -> None:
    ready = EngineCore(engine_config("m"), FakeExecutor(), ManualClock()).start()
    assert [row.name for row in ready.startup] == ["import torch and the worker", "fake weights", "kv cache"]
    assert ready.vocab_tokens == 258


def test_use_before_start_is_refused() -> None:
    core = EngineCore(engine_config("m"), FakeExecutor(), ManualClock())
    with pytest.raises(ConfigError, match="not started"):
        core.step()

"""`TextEngine` over a real core process: text, stop strings, aborts, kills, refusals, health."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fake_device import BOS, NAN, VOCAB, engine_config, expected_text, expected_tokens, next_token

from headrace.base.errors import ContextLengthError, EngineUnavailableError, NumericalError, RequestError
from headrace.engine.request_output import OutputChunk
from headrace.engine.text_engine import TextEngine
from headrace.types.sampling import SamplingParams

Bounded = Callable[[Awaitable[Any]], Awaitable[Any]]
Make = Callable[..., Awaitable[TextEngine]]


@pytest.fixture
async def make_engine(runtime_parent: Path, model_dir: Path) -> AsyncIterator[Make]:
    engines: list[TextEngine] = []

    async def make(factory: str = "make", **options: Any) -> TextEngine:
        engine = TextEngine(engine_config(model_dir, **options), executor_factory=f"fake_device:{factory}")
        engines.append(engine)
        await asyncio.wait_for(engine.start(), 60)
        return engine

    yield make
    for engine in engines:
        await asyncio.wait_for(engine.stop(), 60)


async def _chunks(engine: TextEngine, prompt: Any, sampling: SamplingParams, **options: Any) -> list[OutputChunk]:
    async def collect() -> list[OutputChunk]:
        return [chunk async for chunk in engine.stream(prompt, sampling, **options)]

    return await asyncio.wait_for(collect(), 60)


def _text(chunks: list[OutputChunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


async def test_text_usage_and_first_chunk(make_engine: Make) -> None:
    engine = await make_engine()
    prompt = list(b"hello world, this is a prompt")
    chunks = await _chunks(engine, bytes(prompt).decode(), SamplingParams(max_tokens=50))
    assert _text(chunks) == expected_text(prompt, 50)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(prompt, 50)
    assert chunks[0].prompt_token_ids == prompt
    assert chunks[0].queued_s is not None
    assert all(not chunk.prompt_token_ids for chunk in chunks[1:])
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    again = await _chunks(engine, prompt, SamplingParams(max_tokens=1))
    assert again[0].cached_tokens >= 16, "the second run of the prompt hits the prefix cache"


async def test_front_end_loads_no_torch(make_engine: Make) -> None:
    code = (
        "import headrace, headrace.engine.text_engine, headrace.engine.client, headrace.engine.input_processor, sys\n"
    )
    code += "import headrace.engine.output_processor, headrace.text.tokenizer, headrace.weights.source, headrace.llm\n"
    code += "sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_stop_strings_give_the_same_text_however_they_fall(make_engine: Make) -> None:
    engine = await make_engine("make_slow")
    prompts = [list(f"prompt {number}".encode()) for number in range(24)]
    stops = ["你", "ab", "🙂c", "\n", "é", "界"]

    async def one(prompt: list[int], include: bool) -> None:
        sampling = SamplingParams(max_tokens=120, stop=stops, include_stop_str_in_output=include, logprobs=0)
        chunks = await _chunks(engine, prompt, sampling)
        whole = expected_text(prompt, 120)
        ends = [(whole.index(stop) + len(stop), stop) for stop in stops if stop in whole]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        entries = [entry for chunk in chunks for entry in chunk.logprobs or []]
        assert [entry.token_id for entry in entries] == tokens
        if not ends:
            assert chunks[-1].finish_reason == "length"
            assert _text(chunks) == whole
            return
        end, stop = min(ends)
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)
        assert _text(chunks) == whole[: end if include else end - len(stop)]
        # The tokens end with the one that completed the stop string: nothing that overshot is counted.
        assert bytes(tokens).decode() == whole[:end]

    await asyncio.gather(*(one(prompt, number % 2 == 0) for number, prompt in enumerate(prompts)))
    while engine.stats().running:
        await asyncio.wait_for(engine._require_client().call("stats"), 60)
    assert engine.stats().blocks_free == engine.stats().blocks_total


async def test_n_outputs_interleave_and_each_ends_once(make_engine: Make) -> None:
    engine = await make_engine()
    chunks = await _chunks(engine, "abc", SamplingParams(n=4, max_tokens=20, seed=7))
    for index in range(4):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert mine[0].prompt_token_ids == list(b"abc")
        assert _text(chunks, index) == expected_text(b"abc", 20)
        assert sum(chunk.finish_reason is not None for chunk in mine) == 1


async def test_prompt_logprobs_come_with_the_first_chunk(make_engine: Make) -> None:
    engine = await make_engine()
    prompt = [97 + position % 20 for position in range(150)]  # longer than one step's budget
    chunks = await _chunks(engine, prompt, SamplingParams(max_tokens=3, prompt_logprobs=1))
    entries = chunks[0].prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry is not None] == prompt[1:]
    assert entries[1] is not None
    assert (entries[1].text, entries[1].bytes) == ("b", b"b")
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])


async def test_text_is_the_same_over_a_kill(make_engine: Make) -> None:
    engine = await make_engine("make_slow")
    killed = False
    text = ""
    async with aclosing(engine.stream("tell me", SamplingParams(max_tokens=150))) as stream:
        async for chunk in stream:
            text += chunk.text
            if len(text) > 20 and not killed:
                killed = True
                os.kill(engine._require_client().pid or 0, signal.SIGKILL)
    assert killed
    assert text == expected_text(b"tell me", 150)
    assert engine.health().restarts == 1


async def test_requests_that_arrive_during_a_restart_wait(make_engine: Make, bounded: Bounded) -> None:
    engine = await make_engine("make_slow")
    client = engine._require_client()
    os.kill(client.pid or 0, signal.SIGKILL)
    await bounded(client._life.exited.wait())  # type: ignore[union-attr]
    states = set()
    tasks = [asyncio.create_task(_chunks(engine, f"p{n}", SamplingParams(max_tokens=10))) for n in range(5)]
    while not all(task.done() for task in tasks):
        states.add(engine.health().state)
        await asyncio.wait(tasks, timeout=0.02)
    assert "restarting" in states
    for number, task in enumerate(tasks):
        assert _text(task.result()) == expected_text(f"p{number}".encode(), 10)


async def test_closing_the_iterator_aborts(make_engine: Make, bounded: Bounded) -> None:
    engine = await make_engine("make_slow")
    stream = engine.stream("abc", SamplingParams(n=3, max_tokens=1000))
    await bounded(anext(stream))
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine._require_client().unfinished == 0
    while engine.stats().running:
        await bounded(engine._require_client().call("stats"))
    assert engine.stats().blocks_free == engine.stats().blocks_total


async def test_cancelling_the_reader_aborts(make_engine: Make, bounded: Bounded) -> None:
    engine = await make_engine("make_slow")
    task = asyncio.create_task(_chunks(engine, "abc", SamplingParams(max_tokens=1000)))
    while not engine.stats().running:
        await bounded(engine._require_client().call("stats"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine._require_client().unfinished == 0


async def test_a_bad_row_fails_one_request(make_engine: Make) -> None:
    engine = await make_engine()
    good = asyncio.create_task(_chunks(engine, "abc", SamplingParams(max_tokens=30)))
    with pytest.raises(NumericalError, match="NaN"):
        await _chunks(engine, [97, NAN], SamplingParams(max_tokens=30))
    assert _text(await good) == expected_text(b"abc", 30)


async def test_refusals(make_engine: Make) -> None:
    engine = await make_engine()
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, RequestError, "empty"),
        ([97, VOCAB], {}, RequestError, f"0 to {VOCAB - 1}"),
        ([-1], {}, RequestError, "no token id"),
        ([97] * 2048, {}, ContextLengthError, "2048 tokens"),
        ([97] * 2000, {"max_tokens": 100}, ContextLengthError, "at most 48"),
        ("x" * 10_000_000, {}, ContextLengthError, "10000000 characters"),
        ("a", {"stop_token_ids": [VOCAB]}, RequestError, "stop_token_ids"),
        ("a", {"logit_bias": {VOCAB: 1.0}}, RequestError, "logit_bias"),
        ("a", {"allowed_token_ids": [VOCAB]}, RequestError, "allowed_token_ids"),
    ]
    for prompt, options, error, words in cases:
        with pytest.raises(error, match=words):
            await _chunks(engine, prompt, SamplingParams(**{"max_tokens": 5, **options}))
    assert engine._require_client().unfinished == 0


async def test_max_tokens_fills_the_model(make_engine: Make) -> None:
    engine = await make_engine(blocks=12)  # 96 tokens
    assert engine.max_model_len == 96
    chunks = await _chunks(engine, "abc", SamplingParams(max_tokens=None))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 93
    assert chunks[-1].finish_reason == "length"


async def test_stop_token_ends_without_text(make_engine: Make) -> None:
    engine = await make_engine()
    answer = expected_tokens(b"abc", 30)
    stop = next(token for token in answer if token < 128 and answer.index(token) > 2)
    at = answer.index(stop)
    chunks = await _chunks(engine, "abc", SamplingParams(max_tokens=30, stop_token_ids=[stop]))
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)
    assert [token for chunk in chunks for token in chunk.token_ids] == answer[: at + 1]
    assert _text(chunks) == bytes(answer[:at]).decode(errors="replace")


async def test_health_and_the_end(make_engine: Make, bounded: Bounded) -> None:
    engine = await make_engine("make_slow")
    assert engine.health().state == "ready"
    stream = engine.stream("abc", SamplingParams(max_tokens=1000))
    await bounded(anext(stream))
    engine._stall_limit_s = -1.0
    assert engine.health().state == "stalled"
    assert "no step" in engine.health().reason
    await bounded(engine.stop())
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        await bounded(_drained(stream))
    assert engine.health().state == "stopped"


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_startup_tables_add_up(make_engine: Make) -> None:
    engine = await make_engine()
    for title, rows in engine.startup_tables:
        assert rows, title
        assert all(row.seconds >= 0 for row in rows)
    assert [row.name for row in engine.startup_tables[1][1]][:3] == ["python", "imports", "find model"]


async def test_chat_template_and_defaults(make_engine: Make) -> None:
    engine = await make_engine()
    assert engine.chat_template is not None
    text = engine.chat_template.render([{"role": "user", "content": "hi"}])
    assert text == "user: hi\nassistant:"
    assert engine.defaults == {}
    assert engine.tokenizer.vocab_tokens == VOCAB
    assert BOS in engine.tokenizer.special_ids
    assert next_token([1, 2, 3]) == next_token([1, 2, 3])


def test_the_same_under_uvloop(runtime_parent: Path, model_dir: Path) -> None:
    """The server runs on uvloop, whose descriptors and wake-ups differ."""
    import uvloop

    async def scenario() -> str:
        engine = TextEngine(engine_config(model_dir), executor_factory="fake_device:make_slow")
        await asyncio.wait_for(engine.start(), 60)
        text = ""
        async with aclosing(engine.stream("tell me", SamplingParams(max_tokens=100))) as stream:
            async for chunk in stream:
                text += chunk.text
                if engine.health().restarts == 0 and len(text) > 10 and engine.health().state == "ready":
                    os.kill(engine._require_client().pid or 0, signal.SIGKILL)
        assert engine.health().restarts == 1
        await asyncio.wait_for(engine.stop(), 60)
        return text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == expected_text(b"tell me", 100)

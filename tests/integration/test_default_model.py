"""The embedded SmolLM2 through both doors: the offline class and the engine with its own core process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.text_engine import TextEngine
from headrace.llm import engine_config

pytestmark = [
    pytest.mark.slow,
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "cpu_threads": 2,
    "dtype": "float32",
    "quantization": "none",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def _offline_answer() -> str:
    with LLM("default", **OPTIONS) as llm:
        (result,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
        assert result.outputs[0].token_ids
        return result.outputs[0].text


async def _served_answers(runtime_parent: Path) -> list[str]:
    engine = TextEngine(engine_config("default", OPTIONS))
    await asyncio.wait_for(engine.start(), 120)
    try:
        assert engine.chat_template is not None
        prompt = engine.chat_template.render(QUESTION)
        answers = []
        for kill in (False, True):
            text = ""
            async with aclosing(engine.stream(prompt, GREEDY, add_special_tokens=False)) as stream:
                async for chunk in stream:
                    text += chunk.text
                    if kill and text and engine.health().restarts == 0 and engine.health().state == "ready":
                        os.kill(engine._require_client().pid or 0, signal.SIGKILL)
            answers.append(text)
        assert engine.health().restarts == 1
        return answers
    finally:
        await asyncio.wait_for(engine.stop(), 60)


async def test_chat_knows_paris_offline_served_and_over_a_crash(runtime_parent: Path) -> None:
    offline = await asyncio.to_thread(_offline_answer)
    assert "Paris" in offline
    assert await asyncio.wait_for(_served_answers(runtime_parent), 240) == [offline, offline]

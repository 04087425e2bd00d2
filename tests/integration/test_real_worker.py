"""The real worker on a tiny random model: two ranks, their core killed under load, equal to one rank in-process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_device import write_model

from headrace import LLM, SamplingParams
from headrace.engine.text_engine import TextEngine
from headrace.llm import engine_config

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "num_blocks_override": 64, "kv_cache_memory_bytes": 1 << 20,
    "cpu_threads": 1, "max_num_batched_tokens": 64,
}  # fmt: skip
PROMPTS = ["one", "two and three", "a longer prompt " * 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("tiny") / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def _one(engine: TextEngine, prompt: str, kill_at: int | None) -> list[int]:
    tokens: list[int] = []
    async for chunk in engine.stream(prompt, GREEDY):
        tokens += chunk.token_ids
        if kill_at is not None and len(tokens) >= kill_at and engine.health().restarts == 0:
            kill_at = None
            os.kill(engine._require_client().pid or 0, signal.SIGKILL)
    return tokens


@pytest.mark.slow
async def test_two_ranks_killed_under_load_equal_one_rank(tiny_dir: Path, runtime_parent: Path) -> None:
    def alone() -> list[list[int]]:
        with LLM(str(tiny_dir), **OPTIONS) as llm:
            return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    expected = await asyncio.to_thread(alone)
    assert [len(tokens) for tokens in expected] == [40] * 3
    engine = TextEngine(engine_config(str(tiny_dir), {**OPTIONS, "tensor_parallel_size": 2}))
    await asyncio.wait_for(engine.start(), 120)
    try:
        ranks = psutil.Process(engine._require_client().pid).children(recursive=True)
        assert len(ranks) >= 2
        runs = (_one(engine, prompt, 8 if number == 0 else None) for number, prompt in enumerate(PROMPTS))
        assert await asyncio.wait_for(asyncio.gather(*runs), 120) == expected
        assert engine.health().restarts == 1
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, 20)
        assert not alive, "ranks of the killed core must not live on"
    finally:
        await asyncio.wait_for(engine.stop(), 60)

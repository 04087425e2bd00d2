"""A mirror of a real core process's prefix cache, through evictions and the death of the core."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fake_device import FakeExecutor, engine_config

from headrace.base.clock import ManualClock
from headrace.base.ids import RequestId
from headrace.config import KvEventsConfig
from headrace.engine.client import CoreClient
from headrace.engine.core import EngineCore
from headrace.observe.kv_events import KvEventPublisher
from headrace.types.events import AddRequest
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams

Bounded = Callable[[Awaitable[Any]], Awaitable[Any]]
EVENTS = KvEventsConfig(kv_events="tcp://127.0.0.1:0")


def _example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "mirror_kv_cache.py"
    spec = importlib.util.spec_from_file_location("mirror_kv_cache", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _request(number: int) -> EngineRequest:
    prompt = [97, 98, 99, 100, 101, 102, 103, 104, *range(100 + number, 130 + number)]
    return EngineRequest(
        request_id=RequestId(f"e{number}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=20, seed=1, ignore_eos=True),
    )


async def _serve_some(client: CoreClient, numbers: range) -> None:
    async def collect(number: int) -> None:
        async for _ in client.submit(_request(number)):
            pass

    await asyncio.gather(*(collect(number) for number in numbers))


def _caught_up(mirror: Any, fresh: Any) -> bool:
    """Follow until the mirror stands where a snapshot of now stands."""
    fresh.resync()
    for _ in range(1000):
        if (mirror.epoch, mirror.next_sequence) == (fresh.epoch, fresh.next_sequence):
            return True
        mirror.follow(100)
    return False


async def test_a_mirror_follows_the_cache_over_evictions_and_a_crash(
    make_client: Callable[..., Awaitable[CoreClient]], bounded: Bounded
) -> None:
    example = _example()
    # 24 blocks of 8 tokens: 20 requests of 58 tokens evict each other all the time.
    client = await make_client("make", blocks=24, events=EVENTS)
    mirror = example.CacheMirror(*client.ready.kv_events)
    first_epoch = ""
    try:
        await asyncio.to_thread(mirror.resync)
        for life in range(2):
            await bounded(_serve_some(client, range(100 * life, 100 * life + 20)))
            fresh = example.CacheMirror(*client.ready.kv_events)
            try:
                assert await asyncio.to_thread(_caught_up, mirror, fresh)
                assert mirror.stored.keys() == fresh.stored.keys()
                assert 0 < len(mirror.stored) <= 24
                assert mirror.epoch != first_epoch
            finally:
                fresh.close()
            first_epoch = mirror.epoch
            if not life:
                os.kill(client.ready.pid, signal.SIGKILL)
    finally:
        mirror.close()


def test_a_mirror_equals_the_pool() -> None:
    """In one process, where the pool can be looked at; every question is answered between two steps."""
    published: list[KvEventPublisher] = []
    core = EngineCore(
        engine_config("m", blocks=24, events=EVENTS),
        FakeExecutor(),
        ManualClock(),
        publish=lambda events: published[0].publish(events),
    )
    ready = core.start()
    published.append(KvEventPublisher(EVENTS, hash_tokens=ready.hash_tokens, snapshot=core.kv_snapshot))
    mirror = _example().CacheMirror(published[0].endpoint, published[0].sync_endpoint)
    try:
        for number in range(12):
            core.post(AddRequest(_request(number)))
            while core.has_work:
                core.step()
            asking = threading.Thread(target=mirror.resync)
            asking.start()
            while asking.is_alive():
                published[0].serve()
                asking.join(0.001)
            pools = core._scheduler.kv.memory.pools  # type: ignore[union-attr]
            held = {(index, block_hash) for index, pool in enumerate(pools) for block_hash in pool.cached_hashes()}
            assert mirror.stored.keys() == held
            assert held
        assert mirror.snapshots == 1
    finally:
        mirror.close()
        published[0].close()

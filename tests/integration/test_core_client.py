"""The real client and core process: streams, crashes, aborts, faults, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_device import POISON, engine_config, expected_tokens, logprob_of

from headrace.base.errors import EngineFaultError, EngineUnavailableError, RequestError, WeightLoadError
from headrace.base.ids import RequestId
from headrace.engine.client import CoreClient
from headrace.engine.delta_stream import DeltaStream
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams

Bounded = Callable[[Awaitable[Any]], Awaitable[Any]]
MakeClient = Callable[..., Awaitable[CoreClient]]


def _request(name: str, prompt: list[int], tokens: int, **sampling: Any) -> EngineRequest:
    parameters = SamplingParams(max_tokens=tokens, seed=1, **sampling)
    return EngineRequest(request_id=RequestId(name), prompt_token_ids=prompt, sampling=parameters)


async def _collect(client: CoreClient, request: EngineRequest) -> list[RequestDelta]:
    return [delta async for delta in client.submit(request)]


def _tokens(deltas: list[RequestDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.new_token_ids]


def _prompts(count: int) -> list[list[int]]:
    return [[97 + number % 20, 98, 99 + number // 20, *range(100, 100 + number)] for number in range(count)]


async def test_requests_get_their_tokens_and_the_core_goes_in_order(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make")
    prompts = _prompts(20)
    answers = await bounded(
        asyncio.gather(*(_collect(client, _request(f"r{n}", prompt, 30)) for n, prompt in enumerate(prompts)))
    )
    for prompt, deltas in zip(prompts, answers, strict=True):
        assert _tokens(deltas) == expected_tokens(prompt, 30)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason is not None] == [FinishReason.LENGTH]
    stats = await bounded(client.call("stats"))
    assert stats[3] == stats[4], "all blocks are free again"
    process = client._life.core.process  # type: ignore[union-attr]
    await bounded(client.stop())
    assert process.returncode == 0


async def _killed_twice(client: CoreClient, prompts: list[list[int]], tokens: int, **sampling: Any) -> list[Any]:
    """Stream all prompts; kill the core when all have a few tokens, twice."""
    progress = [0] * len(prompts)
    killed: list[int] = []
    mark = 6

    async def one(number: int) -> list[RequestDelta]:
        nonlocal mark
        deltas = []
        async for delta in client.submit(_request(f"k{number}", prompts[number], tokens, **sampling)):
            deltas.append(delta)
            progress[number] += len(delta.new_token_ids)
            pid = client.pid
            if len(killed) < 2 and client.state == "ready" and pid not in killed and min(progress) >= mark and pid:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                mark = min(progress) + 12
        return deltas

    answers = await asyncio.gather(*(one(number) for number in range(len(prompts))))
    assert len(killed) == 2
    return answers


async def test_two_kills_under_load_are_a_pause(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_slow")
    prompts = _prompts(16)
    answers = await bounded(_killed_twice(client, prompts, 120))
    for prompt, deltas in zip(prompts, answers, strict=True):
        assert _tokens(deltas) == expected_tokens(prompt, 120)
        assert sum(delta.finish_reason is not None for delta in deltas) == 1
    assert client.restarts == 2
    assert client.unfinished == 0
    assert client.stats().generation_tokens >= 16 * 100, "totals go on over the lives"


async def test_logprobs_stay_consistent_over_kills(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_slow")
    prompts = _prompts(4)
    answers = await bounded(_killed_twice(client, prompts, 60, logprobs=0, prompt_logprobs=0))
    for prompt, deltas in zip(prompts, answers, strict=True):
        tokens = _tokens(deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        assert [entry.token_id for entry in entries] == tokens == expected_tokens(prompt, 60)
        expected = [logprob_of(prompt + tokens[:at], token) for at, token in enumerate(tokens)]
        assert [entry.logprob for entry in entries] == expected
        of_prompt = [entry.token_id for delta in deltas for entry in delta.prompt_logprobs or []]
        assert of_prompt == prompt[1:], "prompt log-probabilities came exactly once"


async def test_a_poisoned_request_is_failed_and_the_others_survive(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_poisoned")
    prompts = _prompts(5)
    good = [asyncio.create_task(_collect(client, _request(f"g{n}", prompt, 400))) for n, prompt in enumerate(prompts)]
    bad = asyncio.create_task(_collect(client, _request("bad", [97, POISON, 98], 10)))
    with pytest.raises(EngineFaultError, match="cause"):
        await bounded(bad)
    for prompt, task in zip(prompts, good, strict=True):
        assert _tokens(await bounded(task)) == expected_tokens(prompt, 400)
    assert client.state == "ready"
    assert client.restarts <= 3


async def test_the_others_of_a_failed_requests_stream_end_too(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_poisoned")
    stream = client.open_stream([_request("bad", [97, POISON, 98], 10), _request("other", [97, 98], 2000)])
    with pytest.raises(EngineFaultError):
        await bounded(_drain(stream))
    assert client.unfinished == 0, "nobody reads the other one any more"


async def _drain(stream: DeltaStream) -> None:
    async for _ in stream:
        pass


async def test_a_request_without_an_encoding_fails_its_caller_and_no_restart(
    make_client: MakeClient, bounded: Bounded
) -> None:
    client = await make_client("make")
    odd = _request("\ud800", [97], 1)
    with pytest.raises(UnicodeEncodeError):
        client.submit(odd)
    assert client.unfinished == 0
    assert _tokens(await bounded(_collect(client, _request("good", [97, 98], 3)))) == expected_tokens([97, 98], 3)


async def test_a_lone_poisoned_request_fails_after_two_crashes(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_poisoned")
    with pytest.raises(EngineFaultError):
        await bounded(_collect(client, _request("bad", [97, POISON, 98], 10)))
    assert _tokens(await bounded(_collect(client, _request("good", [97, 98], 10)))) == expected_tokens([97, 98], 10)
    assert client.restarts == 2


async def test_too_many_crashes_end_it(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_slow", max_restarts=0)
    stream = client.submit(_request("r", [97], 500))
    await bounded(anext(stream))
    call = asyncio.create_task(client.call("layout"))
    os.kill(client.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="too often"):
        await bounded(_rest(stream))
    await asyncio.gather(call, return_exceptions=True)
    assert client.state == "failed"
    with pytest.raises(EngineUnavailableError, match="too often"):
        client.submit(_request("later", [97], 5))


async def _rest(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


async def test_a_restart_that_dies_is_tried_again_until_the_budget_is_spent(
    make_client: MakeClient, bounded: Bounded
) -> None:
    client = await make_client("make_once", max_restarts=2)
    stream = client.submit(_request("r", [97], 500))
    await bounded(anext(stream))
    os.kill(client.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="exited with status 3"):
        await bounded(_rest(stream))


async def test_an_abort_frees_the_blocks_within_one_step(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make_slow")
    stream = client.submit(_request("gone", list(range(97, 97 + 40)), 500))
    other = client.submit(_request("stays", [97, 98], 500))
    await bounded(anext(stream))
    await bounded(anext(other))
    before = client.stats()
    assert before.running == 2
    stream.close()
    # Calls are answered in order, between steps: two steps after the abort was sent, its blocks must be back.
    step = (await bounded(client.call("stats")))[0]
    while True:
        now = await bounded(client.call("stats"))
        if now[0] > step:
            break
    assert now[1] == 1, "one request runs"
    other.close()
    while client.stats().running:
        await bounded(client.call("stats"))
    assert client.stats().blocks_free == client.stats().blocks_total
    assert client.unfinished == 0


async def test_a_malformed_message_is_answered_and_survived(
    make_client: MakeClient, bounded: Bounded, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client("make")
    socket = client._life._socket  # type: ignore[union-attr]
    with caplog.at_level("ERROR", logger="headrace"):
        for junk in (b"", b"\x09junk", b"\x01\xc1", b"\x01\x93\xa3add\x01\x02", os.urandom(200)):
            socket.send(junk)
        with pytest.raises(RequestError, match="no control call"):
            await bounded(client.call("launch_missiles"))
    assert sum("the core complains" in line for line in caplog.messages) == 5
    assert _tokens(await bounded(_collect(client, _request("ok", [97], 5)))) == expected_tokens([97], 5)
    assert client.restarts == 0


async def test_a_failed_start_raises_the_cause(runtime_parent: Path, model_dir: Path, bounded: Bounded) -> None:
    client = CoreClient(engine_config(model_dir), executor_factory="fake_device:make_broken")
    with pytest.raises(WeightLoadError, match=r"model\.norm\.weight is missing"):
        await bounded(client.start())
    assert client.state == "failed"


async def test_a_death_while_starting_is_told(runtime_parent: Path, model_dir: Path, bounded: Bounded) -> None:
    client = CoreClient(engine_config(model_dir), executor_factory="fake_device:make_dying")
    with pytest.raises(EngineUnavailableError, match="exited with status 3 while starting"):
        await bounded(client.start())


async def test_an_idle_core_uses_no_processor(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make")
    await bounded(_collect(client, _request("warm", [97], 5)))
    core, front = psutil.Process(client.pid), psutil.Process()
    before = [sum(process.cpu_times()[:2]) for process in (core, front)]
    await asyncio.sleep(1.5)  # the thing measured is time in which nothing happens
    after = [sum(process.cpu_times()[:2]) for process in (core, front)]
    assert after[0] - before[0] <= 0.03
    assert after[1] - before[1] <= 0.15


FRONT_END = """
import asyncio, sys
from pathlib import Path
from fake_device import engine_config
from headrace.engine.client import CoreClient
from headrace.engine.delta_stream import DeltaStream

async def main():
    client = CoreClient(engine_config(sys.argv[1]), executor_factory="fake_device:make")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_core_ends_when_the_front_end_is_killed(
    runtime_parent: Path, model_dir: Path, bounded: Bounded
) -> None:
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FRONT_END, str(model_dir), stdout=asyncio.subprocess.PIPE
    )
    assert front.stdout is not None
    core = psutil.Process(int(await bounded(front.stdout.readline())))
    front.kill()
    await bounded(front.wait())
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [core], 20)
    assert (len(gone), alive) == (1, [])
    assert list(runtime_parent.iterdir()) == [], "the core removes the socket directory then"


async def test_sigterm_is_an_orderly_end(make_client: MakeClient, bounded: Bounded) -> None:
    client = await make_client("make", max_restarts=0)
    life = client._life
    assert life is not None
    os.kill(life.core.pid, signal.SIGTERM)
    await bounded(life.exited.wait())
    await bounded(client.stop())
    assert life.core.process.returncode == 0


async def test_the_socket_directory_is_private(make_client: MakeClient, runtime_parent: Path) -> None:
    await make_client("make")
    (folder,) = runtime_parent.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700

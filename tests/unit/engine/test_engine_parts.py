"""Small parts of the engine room: errors on the wire, flight record, streams, resubmission, launch."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from fake_device import engine_config

from headrace.base.errors import (
    ConfigError,
    ContextLengthError,
    EngineUnavailableError,
    HeadraceError,
    ProtocolError,
)
from headrace.base.ids import RequestId
from headrace.engine.core_launch import CoreLaunch, RuntimeDir, read_launch
from headrace.engine.core_life import pinned_config
from headrace.engine.delta_stream import DeltaStream
from headrace.engine.flight_record import FlightRecorder, read_flight_record
from headrace.engine.pending import PendingRequest
from headrace.kv.budget import fixed_layout
from headrace.observe.startup import StartupTable, print_startup, process_age_s
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
from headrace.types.error_records import error_of, record_of
from headrace.types.outputs import ErrorRecord, FinishReason, RequestDelta
from headrace.types.requests import EngineRequest
from headrace.types.results import TokenLogprobs
from headrace.types.sampling import SamplingParams
from headrace.types.wire import CoreReady, PhaseSeconds

A, B = RequestId("a"), RequestId("b")


def _all_errors(root: type[HeadraceError] = HeadraceError) -> list[type[HeadraceError]]:
    mine = root.__module__ == "headrace.base.errors"
    return ([root] if mine else []) + [found for child in root.__subclasses__() for found in _all_errors(child)]


def test_every_error_survives_the_wire_with_its_class() -> None:
    for kind in _all_errors():
        back = error_of(record_of(kind("what to do", param="field")))
        assert type(back) is kind
        assert (back.message, back.param, back.http_status) == ("what to do", "field", kind.http_status)


def test_foreign_errors() -> None:
    assert record_of(ValueError("x")).message == "ValueError: x"
    back = error_of(ErrorRecord("from_the_future", "odd", "text", 418, True))
    assert (back.code, back.http_status, back.retryable, back.kind) == ("from_the_future", 418, True, "odd")
    assert type(error_of(ErrorRecord("context_length_exceeded", "", "", 400, False))) is ContextLengthError


def test_flight_record(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    assert read_flight_record(path) is None
    with FlightRecorder(path, 4) as recorder:
        assert read_flight_record(path) == set()
        recorder.record([A, B])
        assert read_flight_record(path) == {A, B}
        recorder.record([RequestId("x" * 100_000)])
        assert read_flight_record(path) is None, "what does not fit is unknown"
        recorder.record([B])
    assert read_flight_record(path) == {B}
    path.write_bytes(b"\x05" + b"\0" * 7 + b"\xc1\xc1\xc1\xc1\xc1")
    assert read_flight_record(path) is None


def _delta(request_id: RequestId, tokens: list[int], finish: FinishReason | None = None) -> RequestDelta:
    return RequestDelta(request_id=request_id, new_token_ids=tokens, finish_reason=finish)


async def test_stream_ends_when_all_have_ended() -> None:
    aborted: list[RequestId] = []
    stream = DeltaStream([A, B], aborted.extend)
    stream.put(_delta(A, [1], FinishReason.STOP))
    reader = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(_delta(B, [2], FinishReason.LENGTH))
    assert [delta.new_token_ids for delta in await reader] == [[1], [2]]
    stream.close()
    assert aborted == []


async def _read(stream: DeltaStream) -> list[RequestDelta]:
    return [delta async for delta in stream]


async def test_stream_close_aborts_what_is_open() -> None:
    aborted: list[RequestId] = []
    stream = DeltaStream([A, B], aborted.extend)
    stream.put(_delta(A, [1], FinishReason.STOP))
    stream.close()
    stream.close()
    assert aborted == [B]
    assert await _read(stream) == []


async def test_stream_error_comes_after_what_was_delivered() -> None:
    stream = DeltaStream([A], lambda ids: None)
    stream.put(_delta(A, [1]))
    stream.fail(EngineUnavailableError("gone"))
    stream.fail(EngineUnavailableError("second"))
    assert (await anext(stream)).new_token_ids == [1]
    with pytest.raises(EngineUnavailableError, match="gone"):
        await anext(stream)


async def test_an_error_of_one_request_aborts_the_others_of_its_stream() -> None:
    aborted: list[RequestId] = []
    stream = DeltaStream([A, B], aborted.extend)
    stream.fail(EngineUnavailableError("A is failed as the cause of a crash; B goes on in the new core"))
    stream.put(_delta(B, [1]))
    with pytest.raises(EngineUnavailableError):
        await anext(stream)
    assert B in aborted, "nobody reads B any more, so it must not run to its end"
    assert await _read(stream) == []


async def test_stream_drop_wakes_the_reader() -> None:
    stream = DeltaStream([A], lambda ids: None)
    reader = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)
    stream.drop(A)
    assert await reader == []


def _entries(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0, 1, [], []) for token in tokens]


def test_resubmission_carries_all_that_was_received() -> None:
    sampling = SamplingParams(max_tokens=9, seed=3, prompt_logprobs=0)
    request = EngineRequest(request_id=A, prompt_token_ids=[1, 2, 3, 4], sampling=sampling, produced_token_ids=[5])
    pending = PendingRequest(request, DeltaStream([A], lambda ids: None))
    pending.take(RequestDelta(request_id=A, prompt_logprobs=_entries(2)))
    again = pending.resubmission(())
    assert again.sampling.prompt_logprobs == 0
    delta = pending.take(RequestDelta(request_id=A, prompt_logprobs=_entries(2, 3)))
    assert delta.prompt_logprobs == _entries(3), "the first one was delivered in the earlier life"
    assert pending.take(RequestDelta(request_id=A, prompt_logprobs=_entries(4))).prompt_logprobs == _entries(4)
    pending.take(_delta(A, [6, 7]))
    again = pending.resubmission(())
    assert again.produced_token_ids == [5, 6, 7]
    assert again.sampling.prompt_logprobs is None, "all were delivered"
    assert again.sampling.seed == 3


def test_a_resubmitted_sibling_waits_only_for_a_leader_that_is_there() -> None:
    request = EngineRequest(
        request_id=B, prompt_token_ids=[1], sampling=SamplingParams(seed=3), leader_id=A, deadline_s=7.0, tenant="t"
    )
    pending = PendingRequest(request, DeltaStream([B], lambda ids: None))
    assert pending.resubmission({A, B}).leader_id == A
    # The leader has ended, or is held back as a suspect: nobody would ever compute the prompt for it.
    again = pending.resubmission({B})
    assert again.leader_id is None
    assert (again.deadline_s, again.tenant) == (7.0, "t")


def test_resubmission_twice_in_the_middle_of_the_prompt() -> None:
    sampling = SamplingParams(seed=3, prompt_logprobs=0)
    request = EngineRequest(request_id=A, prompt_token_ids=[1, 2, 3, 4], sampling=sampling)
    pending = PendingRequest(request, DeltaStream([A], lambda ids: None))
    pending.take(RequestDelta(request_id=A, prompt_logprobs=_entries(2, 3)))
    pending.resubmission(())
    assert pending.take(RequestDelta(request_id=A, prompt_logprobs=_entries(2))).prompt_logprobs is None
    pending.resubmission(())
    assert pending.take(RequestDelta(request_id=A, prompt_logprobs=_entries(2, 3, 4))).prompt_logprobs == _entries(4)


def test_launch_record_passes_through_a_pipe() -> None:
    import msgspec

    launch = CoreLaunch(engine_config("m"), "ipc:///x", "/f", "/d")
    payload = msgspec.msgpack.encode(launch)
    reader, writer = os.pipe()
    try:
        os.write(writer, len(payload).to_bytes(8, "little") + payload)
        assert read_launch(reader) == launch
        os.write(writer, (4).to_bytes(8, "little") + b"junk")
        with pytest.raises(ProtocolError, match="launch record"):
            read_launch(reader)
        os.write(writer, b"\x05")
        os.close(writer)
        with pytest.raises(ProtocolError, match="went away"):
            read_launch(reader)
    finally:
        os.close(reader)


def test_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    directory = RuntimeDir()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert not directory.path.exists()
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="HEADRACE_RUNTIME_DIR"):
        RuntimeDir()
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(deep))
    with pytest.raises(ConfigError, match="shorter"):
        RuntimeDir()
    assert list(deep.iterdir()) == []


def test_the_next_life_gets_the_sizes_of_the_first() -> None:
    layout = fixed_layout(
        [LayerCache(0, FullAttentionSpec(1, 8, 8, 4)), LayerCache(1, FullAttentionSpec(1, 8, 8, 4))],
        block_tokens=8,
        usable_blocks=10,
    )
    ready = CoreReady(pid=1, max_model_len=80, vocab_tokens=9, block_tokens=8, layout=layout)
    config = pinned_config(engine_config("m", blocks=None), ready)
    assert config.model.max_model_len == 80
    assert config.cache.num_blocks_override == 10
    assert config.cache.kv_cache_memory_bytes == layout.total_bytes()


def test_startup_table_adds_up_to_wall_time() -> None:
    import io
    import time

    begin = time.monotonic()
    table = StartupTable("here", age_s=1.5)
    table.mark("one")
    table.mark_parts([PhaseSeconds("claimed in parallel", 5.0)], "rest")
    table.mark_parts([PhaseSeconds("tiny", 0.0)], "other")
    assert sum(row.seconds for row in table.rows) == pytest.approx(table.total_s)
    assert 1.5 <= table.total_s <= 1.5 + time.monotonic() - begin
    out = io.StringIO()
    print_startup([(table.title, table.rows)], out)
    assert "claimed in parallel" in out.getvalue()
    assert "here" in out.getvalue()


def test_process_age() -> None:
    import time

    import psutil

    assert process_age_s() == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.5)

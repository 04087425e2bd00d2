"""A client that goes away aborts its request at once: the engine's iterator is closed. Real sockets, no mocks."""

from __future__ import annotations

import json
import socket

import pytest
from http_fake_engine import Call, FakeTextEngine, Hold

from headrace.engine.request_output import OutputChunk


def send(server, path: str, body: dict) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def aborted_metric(server) -> float:
    for line in server.state.metrics.render().decode().splitlines():
        if line.startswith("headrace:request_success_total") and 'finished_reason="abort"' in line:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError("no such metric")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_disconnect_closes_the_engine_iterator(server, engine: FakeTextEngine, path: str, stream: bool, started: bool):
    hold = Hold()
    before = aborted_metric(server)

    def script(call: Call) -> list:
        first = [OutputChunk(0, "one", [1], prompt_token_ids=[5])] if started else []
        return [*first, hold]

    engine.script = script
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    connection = send(server, path, {**body, "stream": stream})
    assert hold.reached.wait(10)
    if stream and started:
        seen = b""
        while b"one" not in seen:
            seen += connection.recv(65536)
    call = engine.calls[0]
    assert not call.closed.is_set()
    connection.close()
    assert call.closed.wait(10)
    assert not call.finished
    assert aborted_metric(server) == before + 1
    assert not server.state.in_flight


def test_disconnect_closes_every_prompt(server, engine: FakeTextEngine):
    holds = [Hold(), Hold(), Hold()]
    engine.script = lambda call: [holds[int(call.prompt)]]
    connection = send(server, "/v1/completions", {"prompt": ["0", "1", "2"], "stream": True})
    assert all(hold.reached.wait(10) for hold in holds)
    connection.close()
    assert all(call.closed.wait(10) for call in engine.calls)
    assert len(engine.calls) == 3


def test_half_a_body_reaches_nobody(server, engine: FakeTextEngine):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt":'
        )
    # The server goes on; the half request never becomes a call.
    connection = send(server, "/v1/completions", {"prompt": "y", "max_tokens": 1})
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.close()
    assert [call.prompt for call in engine.calls] == ["y"]


def test_a_finished_request_is_not_aborted(server, engine: FakeTextEngine):
    before = aborted_metric(server)
    connection = send(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert b"200 OK" in connection.recv(65536)
    connection.close()
    assert engine.calls[0].closed.wait(10)
    assert engine.calls[0].finished
    assert aborted_metric(server) == before

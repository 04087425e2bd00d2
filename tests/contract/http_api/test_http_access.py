"""API keys, CORS, request ids, body limits, lenient mode, time limit."""

from __future__ import annotations

import logging
import socket

import httpx
import openai
import pytest
from http_fake_engine import FakeTextEngine, Hold

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(new_server):
    with new_server(api_key=("secret", "other"), allowed_origins=("https://app.example",)) as server:
        yield server


@pytest.fixture
def locked_http(locked):
    with httpx.Client(base_url=locked.url, trust_env=False, timeout=20) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    ["/v1/models", CHAT, "/tokenize", "/metrics", "/docs", "/openapi.json", "/", "/nowhere", "/health/", "//health"],
)
def test_every_path_is_denied_without_a_key(locked_http: httpx.Client, path: str):
    for method in ("GET", "POST"):
        response = locked_http.request(method, path)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["Bearer wrong", "Bearer", "secret", "Basic secret", "", "Bearer secretx"])
def test_wrong_keys(locked_http: httpx.Client, value: str):
    assert locked_http.get("/v1/models", headers={"authorization": value}).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_open_paths(locked_http: httpx.Client, path: str):
    assert locked_http.get(path).status_code == 200


@pytest.mark.parametrize("value", ["Bearer secret", "bearer other", "Bearer  secret"])
def test_right_keys(locked_http: httpx.Client, value: str):
    assert locked_http.get("/v1/models", headers={"authorization": value}).status_code == 200


def test_the_openai_client_sends_the_key(locked):
    for key, fails in (("secret", False), ("wrong", True)):
        http_client = httpx.Client(trust_env=False)
        with openai.OpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0, http_client=http_client) as client:
            if fails:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
            else:
                assert client.models.list().data[0].id == "fake-model"


def test_a_denied_body_is_not_read(locked_http: httpx.Client):
    assert locked_http.post(CHAT, content=b"not json").status_code == 401


def test_cors_only_for_configured_origins(locked_http: httpx.Client, http: httpx.Client):
    ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
    allowed = locked_http.options(CHAT, headers=ask)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert (
        "access-control-allow-origin"
        not in locked_http.options(CHAT, headers={**ask, "origin": "https://evil.example"}).headers
    )
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=ask).headers


def test_request_id_comes_back(http: httpx.Client):
    response = http.post(CHAT, json=GOOD, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "chatcmpl-abc-1"
    assert http.get("/nowhere", headers={"X-Request-Id": "abc-2"}).headers["x-request-id"] == "abc-2"
    assert http.get("/health", headers={"X-Request-Id": "x" * 300}).headers["x-request-id"] != "x" * 300
    assert len(http.get("/health").headers["x-request-id"]) == 32


def test_request_id_of_a_stream(http: httpx.Client):
    response = http.post(CHAT, json={**GOOD, "stream": True}, headers={"X-Request-Id": "abc-3"})
    assert response.headers["x-request-id"] == "abc-3"
    assert "chatcmpl-abc-3" in response.text


@pytest.fixture(scope="module")
def small(new_server):
    with new_server(max_body_bytes=2048) as server:
        yield server


def test_a_big_body_is_refused_before_it_is_read(small):
    """Only the header is sent: the answer comes without a byte of the body."""
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000000000\r\n\r\n"
        )
        answer = b""
        while b"payload_too_large" not in answer:
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_it_all_sees_the_answer(small):
    with httpx.Client(base_url=small.url, trust_env=False, timeout=20) as client:
        response = client.post("/v1/completions", json={"prompt": "x" * 10_000_000})
        assert response.status_code == 413
        assert "2,048" in response.json()["error"]["message"]
        assert response.headers["x-request-id"]
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_big_body_without_a_length_is_refused(small):
    def parts():
        for _ in range(100):
            yield b"x" * 1000

    with httpx.Client(base_url=small.url, trust_env=False, timeout=20) as client:
        headers = {"content-type": "application/json"}
        assert client.post("/v1/completions", content=parts(), headers=headers).status_code == 413
    assert not small.engine.calls or all(len(call.prompt) < 2048 for call in small.engine.calls)


def test_lenient_mode_logs_and_ignores(new_server, caplog: pytest.LogCaptureFixture):
    with new_server(unknown_fields="ignore") as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        body = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}], "odd": 1}],
            "max_tokens": 1,
            "temprature": 3,
        }
        with caplog.at_level(logging.WARNING):
            assert client.post(CHAT, json=body).status_code == 200
            assert client.post(CHAT, json={**body, "temperature": "hot"}).status_code == 400
        assert server.engine.calls[0].prompt == "user: hi\nassistant:"
    for name in ("temprature", "odd", "cache_control"):
        assert name in caplog.text


def test_time_limit(new_server):
    engine = FakeTextEngine()
    engine.script = lambda call: [Hold()]
    with (
        new_server(engine, request_timeout_s=0.05) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        for stream in (False, True):
            response = client.post(CHAT, json={**GOOD, "stream": stream})
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "request_timeout"
            assert engine.calls[-1].closed.wait(5)


def test_harmless_fields_are_accepted(http: httpx.Client):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "session_id": "s", "parallel_tool_calls": True, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "functions": [], "stop": None, "logit_bias": None,
        "length_penalty": 1.0, "use_beam_search": False, "stream_interval": 1,
    }  # fmt: skip
    assert http.post(CHAT, json={**GOOD, **harmless}).status_code == 200
    # Tools that must not be called are no reason to refuse.
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert http.post(CHAT, json={**GOOD, "tools": tools, "tool_choice": "none"}).status_code == 200

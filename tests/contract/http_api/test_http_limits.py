"""How long a request may live, whose it is, and who shares its cache: what the surface hands to the engine."""

from __future__ import annotations

import httpx
import openai
import pytest
from http_fake_engine import FakeTextEngine, Hold

from headrace.base.errors import ConfigError, RequestTimeoutError
from headrace.config import EngineConfig, ModelConfig, ServerConfig
from headrace.engine.request_output import OutputChunk

PATHS = ("/v1/chat/completions", "/v1/completions")


def body_for(path: str, **fields: object) -> dict[str, object]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {**prompt, "max_tokens": 4, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlives_its_timeout_is_a_504(http: httpx.Client, engine: FakeTextEngine, path, stream):
    engine.script = lambda call: [Hold()]
    response = http.post(path, json=body_for(path, stream=stream, timeout=0.05))
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_timeout", "timeout_error")
    assert "0.05 s (timeout)" in error["message"]
    assert response.headers["x-should-retry"] == "false"
    assert engine.calls[-1].closed.wait(5), "the engine must hear of it"
    assert engine.calls[-1].timeout_s == 0.05


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_has_begun_ends_with_an_error_event(http: httpx.Client, engine: FakeTextEngine, path):
    engine.script = lambda call: [OutputChunk(index=0, text="so far", token_ids=[1]), Hold()]
    response = http.post(path, json=body_for(path, stream=True, timeout=0.2))
    assert response.status_code == 200
    events = [line for line in response.text.split("\n\n") if line]
    assert "so far" in response.text
    assert '"code":"request_timeout"' in events[-2]
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_core_may_notice_first(http: httpx.Client, engine: FakeTextEngine, path, stream):
    engine.script = lambda call: [RequestTimeoutError("the core says so")]
    response = http.post(path, json=body_for(path, stream=stream, timeout=60))
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "request_timeout"


def test_the_openai_client_sees_the_timeout(client: openai.OpenAI, engine: FakeTextEngine):
    engine.script = lambda call: [Hold()]
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="fake-model", messages=[{"role": "user", "content": "hi"}], extra_body={"timeout": 0.05}
        )
    assert caught.value.status_code == 504


@pytest.mark.parametrize("value", [0, -1, "1", None])
def test_a_timeout_is_a_positive_number(http: httpx.Client, engine: FakeTextEngine, value):
    response = http.post(PATHS[0], json=body_for(PATHS[0], timeout=value))
    if value is None:
        assert response.status_code == 200
        assert engine.calls[-1].timeout_s is None
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "timeout"


def test_a_near_name_is_pointed_at(http: httpx.Client):
    error = http.post(PATHS[0], json=body_for(PATHS[0], timeout_s=3)).json()["error"]
    assert "did you mean 'timeout'" in error["message"]


def test_the_shorter_of_both_limits_counts(new_server):
    engine = FakeTextEngine()
    with (
        new_server(engine, request_timeout_s=30.0) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        for asked, given in ((None, 30.0), (5, 5.0), (31.5, 30.0)):
            assert client.post(PATHS[1], json=body_for(PATHS[1], timeout=asked)).status_code == 200
            assert engine.calls[-1].timeout_s == given


# Whose request it is.


def _calls(server, *requests: tuple[str | None, str | None]) -> list[tuple[str | None, str | None]]:
    """Send one request for each (key, cache salt); return (tenant, salt) as the engine saw them."""
    first = len(server.engine.calls)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for number, (key, salt) in enumerate(requests):
            path = PATHS[number % 2]
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert client.post(path, json=body_for(path, cache_salt=salt), headers=headers).status_code == 200
    return [(call.tenant, call.cache_salt) for call in server.engine.calls[first:]]


def test_without_keys_there_is_no_tenant(server):
    assert _calls(server, (None, None), (None, "mine")) == [(None, None), (None, "mine")]


def test_a_key_is_a_tenant_and_leaves_the_salt_alone(new_server):
    with new_server(api_key=("alpha", "beta")) as server:
        seen = _calls(server, ("alpha", None), ("beta", "mine"), ("alpha", "mine"))
    (alpha, no_salt), (beta, salt), (again, _) = seen
    assert alpha == again != beta
    assert (no_salt, salt) == (None, "mine")
    assert "alpha" not in (alpha or "")


def test_with_salts_for_keys_no_key_shares_prefixes_with_another(new_server):
    with new_server(api_key=("alpha", "beta"), salt_per_api_key=True) as server:
        seen = _calls(
            server,
            *((key, salt) for key in ("alpha", "beta") for salt in (None, None, "mine", "mine", "none")),
        )
        tenants = {tenant for tenant, _ in seen}
        salts = [salt for _, salt in seen]
        assert len(tenants) == 2
        # Equal for one key and one salt, different for every other pair; the request's own salt still separates.
        assert salts[0] == salts[1]
        assert salts[2] == salts[3]
        assert len(set(salts)) == 6
        assert not any(word in salt for salt in salts for word in ("alpha", "beta", "mine"))
        assert not any(tenant in salt for salt in salts for tenant in tenants)


def test_salts_for_keys_need_keys(monkeypatch: pytest.MonkeyPatch):
    from headrace.serve.server import run_server

    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="--salt-per-api-key needs keys"):
        run_server(EngineConfig(ModelConfig("/nowhere")), ServerConfig(port=0, salt_per_api_key=True))

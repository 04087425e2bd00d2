"""Health, version, metrics, models, token endpoints, documentation."""

from __future__ import annotations

import subprocess
import sys

import httpx
import openai
import pytest
from fastapi.openapi.models import OpenAPI
from http_fake_engine import FakeHealth, FakeTextEngine

from headrace.base.errors import EngineFaultError
from headrace.engine.request_output import OutputChunk
from headrace.observe.metrics import ServerMetrics
from headrace.types.outputs import SchedulerStats
from headrace.version import __version__

USER = [{"role": "user", "content": "hi"}]


def test_health_when_ready(http: httpx.Client):
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"state": "ready", "reason": "", "restarts": 0, "steps": 7, "in_flight": 0}
    assert http.head("/health").status_code == 200
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200


@pytest.mark.parametrize("state", ["starting", "restarting", "stalled", "failed"])
def test_health_says_why_not(http: httpx.Client, engine: FakeTextEngine, state: str):
    engine.fake_health = FakeHealth(state=state, reason="because")
    response = http.get("/health")
    assert response.status_code == 503
    assert (response.json()["state"], response.json()["reason"]) == (state, "because")
    assert http.get("/ping").status_code == 503


@pytest.mark.parametrize("state", ["starting", "failed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/tokenize", {"prompt": "x"}),
    ],
)
def test_no_work_while_starting_or_failed(http: httpx.Client, engine: FakeTextEngine, state, path: str, body: dict):
    engine.fake_health = FakeHealth(state=state)
    response = http.post(path, json=body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert not engine.calls


def test_version(http: httpx.Client):
    assert http.get("/version").json() == {"version": __version__}


def test_models(client: openai.OpenAI, http: httpx.Client, engine: FakeTextEngine):
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").max_model_len == 1000
    engine.model_name = "org/name"
    try:
        assert http.get("/v1/models/org/name").json()["id"] == "org/name"
    finally:
        del engine.model_name


def test_tokenize_and_back(http: httpx.Client):
    answer = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 4, "max_model_len": 1000, "tokens": [256, 104, 0xC3, 0xA9], "token_strs": ["<bos>", "h", "�", "�"]
    }  # fmt: skip
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<bos>hé"}
    plain = http.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert (plain["tokens"], plain["token_strs"]) == ([104], None)


def test_tokenize_messages_equals_the_prompt_of_a_chat(http: httpx.Client, engine: FakeTextEngine):
    tokens = http.post("/tokenize", json={"messages": USER}).json()["tokens"]
    usage = http.post("/v1/chat/completions", json={"messages": USER, "return_token_ids": True}).json()
    assert usage["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "exactly one of"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "exactly one of"),
        ("/tokenize", {"promt": "x"}, "did you mean 'prompt'"),
        ("/tokenize", {"prompt": 5}, "must be a string"),
        ("/detokenize", {}, "'tokens' is required"),
        ("/detokenize", {"tokens": [1, -1]}, "'tokens[1]' must be at least 0"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]=258"),
        ("/detokenize", {"tokens": ["a"]}, "must be an integer"),
    ],
)
def test_bad_token_requests(http: httpx.Client, path: str, body: dict, words: str):
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def samples(text: str) -> dict[str, float]:
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")
    }


LABELS = 'engine="0",model_name="fake-model"'


def test_metrics_count_what_happened(new_server):
    with new_server() as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "n": 2})
        server.engine.script = lambda call: [
            OutputChunk(0, "a", [1], prompt_token_ids=[9], queued_s=0.2), EngineFaultError("x")
        ]  # fmt: skip
        http.post("/v1/completions", json={"prompt": "hi"})
        server.engine.fake_health = FakeHealth(restarts=3)
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        seen = samples(response.text)
    expected = {
        "num_requests_running": 2, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.6,
        "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 0, "num_preemptions_total": 0,
        "core_restarts_total": 3, "prompt_tokens_total": 4, "generation_tokens_total": 7,
        "time_to_first_token_seconds_count": 3, "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 3, "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 0.2,
    }  # fmt: skip
    for name, value in expected.items():
        assert seen[f"headrace:{name}{{{LABELS}}}"] == value, name
    finished = {
        reason: seen[f'headrace:request_success_total{{engine="0",finished_reason="{reason}",model_name="fake-model"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert finished == {"stop": 0, "length": 2, "abort": 0, "error": 1}


def test_counters_do_not_fall_when_the_core_starts_anew():
    stats = SchedulerStats(preemptions=5)
    metrics = ServerMetrics("m", stats=lambda: stats, restarts=lambda: 0)
    key = 'headrace:num_preemptions_total{engine="0",model_name="m"}'
    assert samples(metrics.render().decode())[key] == 5
    stats = SchedulerStats(preemptions=2)
    assert samples(metrics.render().decode())[key] == 7


def test_openapi_is_complete(http: httpx.Client):
    document = http.get("/openapi.json").json()
    OpenAPI.model_validate(document)
    paths = {"/v1/models", "/v1/models/{model_id}", "/v1/completions", "/v1/chat/completions", "/tokenize",
             "/detokenize", "/health", "/ping", "/version", "/metrics"}  # fmt: skip
    assert set(document["paths"]) == paths
    schemas = document["components"]["schemas"]

    def references(node: object):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"].removeprefix("#/components/schemas/")
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    assert set(references(document)) <= set(schemas)
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatCompletionRequest")
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False
    assert {"temperature", "top_k", "cache_salt"} <= set(schemas["ChatCompletionRequest"]["properties"])
    assert http.get("/docs").status_code == 200


def test_import_is_light():
    """No torch, and nothing of the engine's inside."""
    code = (
        "import sys, headrace.serve.app\n"
        "print([m for m in ('torch', 'transformers', 'zmq', 'tokenizers', 'headrace.worker') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"

"""The same surface over the real engine with the real default model: one `headrace serve` process for all tests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

pytestmark = [
    pytest.mark.timeout(180),
    # Looked up, not imported: the import opens files that it never closes.
]
CHAT = "/v1/chat/completions"
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


class RealServer:
    def __init__(self) -> None:
        # float32: the mode whose output does not depend on batching and cache hits, so that answers can be compared.
        # float32: the mode whose output does not depend on batching and cache hits, so that answers can be compared.
        flags = ["--port", "0", "--dtype", "float32", "--max-model-len", "2048", "--cpu-threads", "2"]
        command = [sys.executable, "-m", "headrace", "serve", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.shown = ""
        assert self.process.stdout is not None
        while "is ready" not in self.shown:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.shown += line
        found = re.search(r"is ready: (http://[0-9.:]+)", self.shown)
        assert found is not None
        self.url = found.group(1)

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", trust_env=False).text
        found = re.search(rf"^headrace:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found.group(1))

    def wait_until_idle(self) -> None:
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            pass


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    server = RealServer()
    with server.process:
        yield server
        server.process.send_signal(signal.SIGTERM)
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Start-up" in errors


@pytest.fixture
def http(real: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture
def client(real: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def post(http: httpx.Client, path: str, **body: object) -> dict:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str, **body: object) -> list[dict]:
    response = http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    blocks = response.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


def test_a_chat_knows_the_capital(client: openai.OpenAI):
    answer = client.chat.completions.create(model="default", messages=CAPITAL, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 10


def test_stream_equals_plain_answer(http: httpx.Client):
    body = {
        "messages": [{"role": "user", "content": "Write a line with emojis and one in Chinese."}],
        "seed": 3,
        "max_tokens": 40,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    plain = post(http, CHAT, **body)
    texts, ids, entries = ["", ""], [[], []], [[], []]
    for event in stream(http, CHAT, **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            ids[choice["index"]] += choice.get("token_ids", [])
            entries[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    for index, choice in enumerate(plain["choices"]):
        assert texts[index] == choice["message"]["content"]
        assert ids[index] == choice["token_ids"]
        assert [e["token"] for e in entries[index]] == [e["token"] for e in choice["logprobs"]["content"]]
        assert len(ids[index]) == len(entries[index])
    assert texts[0] != texts[1]
    assert http.get("/health").json()["restarts"] == 0


def test_seed_and_usage(client: openai.OpenAI):
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="default", prompt="Once upon a time", seed=seed, max_tokens=12, temperature=1.0
        )
        assert answer.usage.completion_tokens == 12
        return answer.choices[0].text

    assert ask(-5) == ask(-5)
    assert ask(1) != ask(2)


def test_a_second_time_the_prompt_is_cached(client: openai.OpenAI):
    messages = [{"role": "user", "content": "Repeat this list: " + ", ".join(str(number) for number in range(60))}]
    first, second, salted = (
        client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=8, extra_body={"cache_salt": salt}
        )
        for salt in (None, None, "tenant")
    )
    assert first.choices[0].message.content == second.choices[0].message.content == salted.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_several_answers_share_the_computation_of_their_prompt(real: RealServer, client: openai.OpenAI):
    """Of 4 x 500 prompt tokens all but 500 and three last parts of a block come from the cache."""
    prompt = [(7 * number) % 900 + 100 for number in range(500)]

    def ask(n: int) -> openai.types.Completion:
        return client.completions.create(
            model="default", prompt=prompt, n=n, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
        )

    real.wait_until_idle()
    queries, hits = real.metric("prefix_cache_queries_total"), real.metric("prefix_cache_hits_total")
    answer = ask(4)
    real.wait_until_idle()
    assert real.metric("prefix_cache_queries_total") - queries == 4 * 500
    assert real.metric("prefix_cache_hits_total") - hits == 3 * (500 // 16 * 16)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (500, 24)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert {choice.text for choice in answer.choices} == {ask(1).choices[0].text}


def test_a_request_out_of_time_frees_the_device(real: RealServer, http: httpx.Client):
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "timeout": 0.3}
    for stream in (False, True):
        response = http.post("/v1/completions", json={**body, "stream": stream})
        assert '"code":"request_timeout"' in response.text.replace(" ", "")
        # A machine under load may not have streamed anything by then.
        assert response.status_code in ({200, 504} if stream else {504})
    real.wait_until_idle()
    assert real.metric("kv_cache_usage_perc") == 0.0


def test_echo_scores_a_text(client: openai.OpenAI):
    """As evaluation harnesses do it: the likelier continuation has the higher sum."""

    def score(ending: str) -> float:
        context = "The capital of France is"
        answer = client.completions.create(
            model="default", prompt=context + ending, echo=True, logprobs=1, max_tokens=1, temperature=0
        ).choices[0]
        logprobs = answer.logprobs
        lengths = {
            len(logprobs.tokens),
            len(logprobs.token_logprobs),
            len(logprobs.top_logprobs),
            len(logprobs.text_offset),
        }
        assert len(lengths) == 1
        assert answer.text.startswith(context + ending)
        assert logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert answer.text[offset : offset + len(token)] == token
        scored = zip(logprobs.text_offset, logprobs.token_logprobs, strict=True)
        return sum(value for offset, value in scored if len(context) <= offset < len(context + ending))

    assert score(" Paris") > score(" banana") + 2


def test_logprobs_of_a_split_character(http: httpx.Client):
    choice = post(http, "/v1/completions", prompt="hi 𓀀 ", echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert any(token.startswith("bytes:") for token in choice["logprobs"]["tokens"])
    assert choice["text"].startswith("hi 𓀀 ")


def test_stop_string_stays_out_and_is_named(http: httpx.Client):
    body = {"prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 40}
    for kept in (False, True):
        plain = post(http, "/v1/completions", **body, stop=["9"], include_stop_str_in_output=kept)["choices"][0]
        assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", "9")
        assert plain["text"].endswith("9") is kept
        events = stream(http, "/v1/completions", **body, stop=["9"], include_stop_str_in_output=kept)
        assert "".join(choice["text"] for event in events for choice in event["choices"]) == plain["text"]


def test_continue_the_last_message(client: openai.OpenAI):
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is the city of"}]
    answer = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=5, extra_body={"continue_final_message": True}
    )
    assert "Paris" in answer.choices[0].message.content


def test_tokens_go_there_and_back(http: httpx.Client):
    text = "Hello, 世界 🙂\n"
    tokens = post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(http, "/detokenize", tokens=tokens)["prompt"] == text
    chat = post(http, "/tokenize", messages=CAPITAL, return_token_strs=True)
    assert "<|im_start|>" in chat["token_strs"][0]
    assert post(http, CHAT, messages=CAPITAL, max_tokens=1)["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": "word " * 5000}, 400, "context_length_exceeded"),
        ({"prompt": "x" * 5_000_000}, 400, "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": 5000}, 400, "context_length_exceeded"),
        ({"prompt": [2**31 - 1]}, 400, "invalid_request"),
        ({"prompt": "x", "stop_token_ids": [2**31 - 1]}, 400, "invalid_request"),
        ({"prompt": "x", "logit_bias": {"9999999": 1}}, 400, "invalid_request"),
        ({"prompt": "x", "allowed_token_ids": [9999999]}, 400, "invalid_request"),
        ({"prompt": "x", "chat_template": "no"}, 400, "unknown_field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_engine_refuses_with_a_status(http: httpx.Client, body: dict, status: int, code: str):
    for streamed in (False, True):
        response = http.post("/v1/completions", json={**body, "stream": streamed})
        assert response.status_code == status, response.text[:500]
        assert response.json()["error"]["code"] == code, response.text[:500]


def test_a_template_that_loops_for_ever_stops_nobody(http: httpx.Client):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
    with ThreadPoolExecutor(1) as pool:
        bad = pool.submit(http.post, CHAT, json={"messages": CAPITAL, "chat_template": endless})
        assert (
            "Paris"
            in post(http, CHAT, messages=CAPITAL, temperature=0, max_tokens=32)["choices"][0]["message"]["content"]
        )
        assert bad.result().status_code == 400
        assert bad.result().json()["error"]["code"] == "chat_template"


def test_disconnected_clients_free_their_blocks(real: RealServer):
    real.wait_until_idle()
    host, port = real.url.removeprefix("http://").split(":")
    connections = []
    for streamed in (True, False, True):
        body = json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": streamed}).encode()
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        connections.append(connection)
    while real.metric("num_requests_running") < 3:
        pass
    for connection in connections:
        connection.close()
    real.wait_until_idle()
    assert real.metric("kv_cache_usage_perc") == 0
    assert httpx.get(real.url + "/health", trust_env=False).json()["unfinished"] == 0


def test_many_at_once_answer_like_one(http: httpx.Client):
    def ask(number: int) -> str:
        body = {"prompt": f"{number} plus {number} is", "temperature": 0, "max_tokens": 8}
        return post(http, "/v1/completions", **body)["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert len(set(together)) > 6
    assert all(together)

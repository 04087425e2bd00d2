"""Every bad input has a clear error with the right status, in OpenAI's envelope, and leaves the server alive."""

from __future__ import annotations

import httpx
import openai
import pytest
from http_fake_engine import FakeTextEngine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def still_alive(http: httpx.Client, engine: FakeTextEngine):
    """After each bad request a good one works, and the engine saw nothing of the bad one."""
    yield
    seen = len(engine.calls)
    assert http.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200
    assert seen == 0


def refused(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return document["error"]


def parts(part: dict) -> dict:
    return {"messages": [{"role": "user", "content": [part]}]}


CHAT_CASES = [
    # (change to a good body, status, field, words of the message)
    ({"temprature": 1}, 400, "temprature", "did you mean 'temperature'?"),
    ({"zzzzzz": 1}, 400, "zzzzzz", "unknown field 'zzzzzz'"),
    ({"stream_options": {"include_usge": True}, "stream": True}, 400, "stream_options.include_usge", "'include_usage'"),
    ({"messages": [{"role": "user", "contents": "x"}]}, 400, "messages[0].contents", "'content'"),
    (parts({"type": "text", "txt": "x"}), 400, "messages[0].content[0].txt", "'text'"),
    ({"messages": None}, 400, "messages", "must be a list, got null"),
    ({"messages": []}, 400, "messages", "non-empty"),
    ({"messages": "hello"}, 400, "messages", "must be a list, got the string 'hello'"),
    ({"messages": [5]}, 400, "messages[0]", "must be an object, got 5"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "is required"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "is required"),
    ({"messages": [{"role": "boss", "content": "x"}]}, 400, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "a string or a list of parts, got 5"),
    (parts({"type": "text"}), 400, "messages[0].content[0].text", "is required"),
    ({"temperature": "hot"}, 400, "temperature", "must be a number, got the string 'hot'"),
    ({"temperature": "1"}, 400, "temperature", "must be a number"),
    ({"temperature": -1}, 400, "temperature", "must be in [0, 100], got -1"),
    ({"temperature": True}, 400, "temperature", "must be a number, got true"),
    ({"top_p": 0}, 400, "top_p", "1]"),
    ({"top_p": 1.5}, 400, "top_p", "1]"),
    ({"top_k": -2}, 400, "top_k", "-1"),
    ({"top_k": 10**30}, 400, "top_k", "below"),
    ({"min_p": 2}, 400, "min_p", "[0, 1]"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "[-2, 2]"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": -5}, 400, "max_tokens", "at least 1, got -5"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "must be an integer"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", "at least 1, got 0"),
    ({"min_tokens": 5, "max_tokens": 2}, 400, "min_tokens", "max_tokens=2"),
    ({"n": 0}, 400, "n", "[1, 128]"),
    ({"n": 1000}, 400, "n", "[1, 128]"),
    ({"stop": ["a"] * 100}, 400, "stop", "at most 64"),
    ({"stop": ""}, 400, "stop", "empty string"),
    ({"stop": 5}, 400, "stop", "must be a list"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids[0]", "at least 0"),
    ({"seed": 2**70}, 400, "seed", "below"),
    ({"logit_bias": {"cat": 1}}, 400, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"5": "x"}}, 400, "logit_bias.5", "must be a number"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 101}, 400, "top_logprobs", "[0, 100]"),
    ({"logprobs": 3}, 400, "logprobs", "true or false, got 3"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids", "must not be empty"),
    ({"timeout": 0}, 400, "timeout", "must be above 0"),
    ({"timeout": "5"}, 400, "timeout", "must be a number"),
    ({"cache_salt": ""}, 400, "cache_salt", "non-empty"),
    ({"cache_salt": "x" * 1025}, 400, "cache_salt", "at most 1024 characters"),
    ({"stream_options": {}}, 400, "stream_options", "stream=true"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "got 0"),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", "at least -1"),
    ({"continue_final_message": True}, 400, "continue_final_message", "role 'assistant', got 'user'"),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message", "exclude"),
    ({"chat_template": "raise_exception"}, 400, "chat_template", "raised"),
    ({"chat_template": "{% broken"}, 400, "chat_template", "does not parse"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "'messages'"),
    ({"model": "gpt-4"}, 404, "model", "serves 'fake-model'"),
    ({"model": 5}, 400, "model", "must be a string"),
    ({"response_format": {"type": "json_object"}}, 501, "response_format", "'json_object'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, 501, "response_format", "'json_schema'"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "'json_object'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 501, "tools", "tool calling"),
    ({"tool_choice": "auto"}, 501, "tool_choice", "tool calling"),
    ({"functions": [{"name": "f"}]}, 501, "functions", "tool calling"),
    ({"guided_json": {}}, 501, "guided_json", "structured output"),
    ({"use_beam_search": True}, 501, "use_beam_search", "beam search"),
    ({"store": True}, 501, "store", "storing"),
    ({"modalities": ["text", "audio"]}, 501, "modalities", "output other than text"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 501, "messages[0].role", "tool calling"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 501, "messages[0].tool_calls", "tool calling"),
    (parts({"type": "image_url", "image_url": {}}), 501, "messages[0].content[0]", "'image_url'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param", "words"), CHAT_CASES, ids=lambda value: str(value)[:50])
def test_chat(http: httpx.Client, change: dict, status: int, param: str, words: str):
    error = refused(http.post(CHAT, json={"messages": USER, **change}), status)
    assert error["param"] == param
    assert words in error["message"]
    # The same answer for a stream: the error comes before the stream begins.
    if "stream_options" not in change:
        assert refused(http.post(CHAT, json={"messages": USER, "stream": True, **change}), status) == error


TEXT_CASES = [
    ({"prompt": None}, 400, "prompt", "a string, a list of strings, token ids, or a list of lists"),
    ({"prompt": {}}, 400, "prompt", "got an object"),
    ({"prompt": []}, 400, "prompt", "non-empty"),
    ({"prompt": [[]]}, 400, "prompt[0]", "non-empty"),
    ({"prompt": ["a", 5]}, 400, "prompt[1]", "must be a string, got 5"),
    ({"prompt": [5, "a"]}, 400, "prompt[1]", "must be an integer, got the string 'a'"),
    ({"prompt": [-5]}, 400, "prompt[0]", "at least 0"),
    ({"prompt": [1.5]}, 400, "prompt[0]", "must be an integer"),
    ({"logprobs": 101}, 400, "logprobs", "[0, 100]"),
    ({"logprobs": True}, 400, "logprobs", "must be an integer, got true"),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs", "[0, 100]"),
    ({"best_of": 3}, 501, "best_of", "best_of=3 with n=1"),
    ({"suffix": "end"}, 501, "suffix", "'suffix'"),
    ({"prompt_embeds": "x"}, 501, "prompt_embeds", "embeddings"),
    ({"n": 100, "prompt": ["x"] * 100}, 400, "prompt", "10000 outputs"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"max_tokens": 0, "echo": True, "logprobs": 1}, 400, "max_tokens", "score a prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param", "words"), TEXT_CASES, ids=lambda value: str(value)[:50])
def test_completions(http: httpx.Client, change: dict, status: int, param: str, words: str):
    error = refused(http.post(TEXT, json={"prompt": "hi", **change}), status)
    assert error["param"] == param
    assert words in error["message"]


BODIES = [
    (b"", "empty"),
    (b"not json", "not valid JSON"),
    (b'{"messages": [', "not valid JSON"),
    (b'{"messages": [], "temperature": NaN}', "not valid JSON"),
    (b'{"messages": [], "temperature": Infinity}', "not valid JSON"),
    (b'{"messages": [], "temperature": -Infinity}', "not valid JSON"),
    (b'{"messages": [], "temperature": 1e999}', "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
    (b'{"messages": "\xff"}', "not valid JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
    (b"[]", "the body must be an object, got an empty list"),
    (b"null", "the body must be an object, got null"),
    (b'"text"', "the body must be an object"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=lambda value: str(value[:30]))
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_bodies_that_are_no_request(http: httpx.Client, path: str, body: bytes, words: str):
    assert words in refused(http.post(path, content=body, headers=JSON), 400)["message"]


@pytest.mark.parametrize("digits", [30, 400, 10_000])
@pytest.mark.parametrize("name", ["temperature", "seed", "max_tokens", "prompt"])
def test_huge_numbers(http: httpx.Client, name: str, digits: int):
    # As text: Python itself refuses to print such a number.
    body = f'{{"prompt": "x", "{name}": {"9" * digits}}}'
    assert len(refused(http.post(TEXT, content=body, headers=JSON), 400)["message"]) < 200


def test_deep_nesting_in_a_free_field(http: httpx.Client):
    deep = b'{"messages":[{"role":"user","content":"x"}],"guided_json":' + b"[" * 400 + b"]" * 400 + b"}"
    refused(http.post(CHAT, content=deep, headers=JSON), 501)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", *[1] * 500_000]},
        {"prompt": [[1], *["x"] * 500_000]},
        {"prompt": "x", "stop_token_ids": ["x"] * 500_000},
        {"prompt": "x", "logit_bias": {str(number): "x" for number in range(200_000)}},
        {"prompt": "x", "y" * 2_000_000: 1},
        {"prompt": "x", **{f"unknown{number}": 1 for number in range(100_000)}},
        {"prompt": "x", "model": "m" * 2_000_000},
        {"prompt": "x", "temperature": "t" * 2_000_000},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_big_mistake_is_one_short_error_soon(http: httpx.Client, body: dict):
    response = http.post(TEXT, json=body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 1000
    assert response.elapsed.total_seconds() < 5


def test_a_long_url(http: httpx.Client):
    assert len(refused(http.get("/v1/" + "x" * 20_000), 404)["message"]) < 300


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_media_types_that_browsers_send_unasked_are_refused(http: httpx.Client, media_type: str | None):
    request = http.build_request("POST", CHAT, content=b'{"messages": []}')
    if media_type is not None:
        request.headers["content-type"] = media_type
    assert "application/json" in refused(http.send(request), 415)["message"]


def test_a_compressed_body_is_refused(http: httpx.Client):
    request = http.build_request("POST", CHAT, json={"messages": []}, headers={"content-encoding": "gzip"})
    assert "Content-Encoding gzip" in refused(http.send(request), 415)["message"]


def test_json_with_charset_is_fine(http: httpx.Client):
    body = b'{"messages":[{"role":"user","content":"x"}], "max_tokens": 0}'
    refused(http.post(CHAT, content=body, headers={"content-type": "application/json; charset=utf-8"}), 400)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/chat/completions", 404, "/v1/chat/completions"),
        ("POST", "/v1/chat/completion", 404, "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/", 404, "/v1/chat/completions"),
        ("GET", "/v2/model", 404, "/v1/models"),
        ("GET", "/completely/elsewhere/and/far", 404, "/docs"),
        ("GET", "/v1/models/other", 404, "fake-model"),
        ("GET", "/v1/chat/completions", 405, "use POST"),
        ("DELETE", "/v1/models", 405, "use GET"),
        ("PUT", "/tokenize", 405, "use POST"),
    ],
)
def test_urls_and_methods(http: httpx.Client, method: str, path: str, status: int, words: str):
    assert words in refused(http.request(method, path), status)["message"]


def test_the_openai_client_raises_its_own_types(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="fake-model", messages=USER, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_request"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="fake-model"):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError, match="did you mean"):
        client.completions.create(model="fake-model", prompt="x", extra_body={"max_token": 1})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="fake-model", messages=USER, max_tokens=0, stream=True)


def test_a_missing_feature_is_not_tried_again(server, engine: FakeTextEngine):
    """OpenAI's clients repeat any 5xx unless the server says that it is of no use."""
    sent = []
    transport = httpx.Client(trust_env=False, event_hooks={"request": [lambda request: sent.append(request)]})
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=2, http_client=transport)
    with client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake-model", messages=USER, response_format={"type": "json_object"})
    assert len(sent) == 1


def test_no_chat_template(http: httpx.Client, engine: FakeTextEngine):
    engine.chat_template = None
    error = refused(http.post(CHAT, json={"messages": USER}), 400)
    engine.reset()
    assert "/v1/completions" in error["message"]

"""Chat completions through the official client and raw HTTP."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from http_fake_engine import FakeTextEngine, Hold

from headrace.base.errors import EngineFaultError, OverloadedError
from headrace.engine.request_output import OutputChunk
from headrace.serve.openai.chat_schema import ChatCompletionAnswer, ChatCompletionChunk

USER = [{"role": "user", "content": "hi"}]
REPLY = "Hello, 世界 🙂!"


def events_of(response: httpx.Response) -> list[dict]:
    """Decode a stream; its last event must be the end mark."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [block for block in response.text.split("\n\n") if block]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_plain_answer(client: openai.OpenAI, engine: FakeTextEngine):
    answer = client.chat.completions.create(model="fake-model", messages=USER)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = engine.tokenizer.encode("user: hi\nassistant:", add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(REPLY.encode())
    assert answer.usage.total_tokens == len(prompt) + len(REPLY.encode())
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert engine.calls[0].add_special_tokens is False
    assert engine.calls[0].sampling.max_tokens is None


def test_stream_equals_plain_answer(client: openai.OpenAI):
    plain = client.chat.completions.create(model="fake-model", messages=USER, n=2, seed=1)
    texts = ["", ""]
    for event in client.chat.completions.create(model="fake-model", messages=USER, n=2, seed=1, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]


def test_stream_shape(http: httpx.Client):
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    events = events_of(http.post("/v1/chat/completions", json=body))
    for event in events:
        ChatCompletionChunk.model_validate(event)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"] for event in events[1:-1]] == [{"content": "H"}, {"content": "e"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "length"]
    assert all("finish_reason" in event["choices"][0] and event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert len({event["id"] for event in events}) == 1


def test_stream_without_usage_option_has_no_usage(http: httpx.Client):
    events = events_of(http.post("/v1/chat/completions", json={"messages": USER, "stream": True}))
    assert all("usage" not in event for event in events)


def test_continuous_usage(http: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "stream": True, "stream_options": options, "max_tokens": 3}
    events = events_of(http.post("/v1/chat/completions", json=body))
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 1, 2, 3, 3, 3]


async def test_async_client_streams(server):
    http_client = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", http_client=http_client) as client:
        text = ""
        async for event in await client.chat.completions.create(model="fake-model", messages=USER, stream=True):
            text += event.choices[0].delta.content or ""
    assert text == REPLY


def test_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="fake-model", messages=USER, logprobs=True, top_logprobs=2, max_tokens=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["H", "e"]
    assert content[0].bytes == [72]
    assert content[0].logprob == -0.5
    assert [top.token for top in content[0].top_logprobs] == ["H", "I"]


def test_logprobs_of_a_split_character_show_its_bytes(http: httpx.Client, engine: FakeTextEngine):
    engine.reply = "🙂"
    body = {"messages": USER, "logprobs": True, "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json=body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == r"bytes:\xf0"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🙂"


def test_streamed_logprobs_lose_no_token(http: httpx.Client):
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "stream": True}
    events = events_of(http.post("/v1/chat/completions", json=body))
    entries = [entry for e in events for c in e["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == REPLY


def test_token_ids_and_token_names(http: httpx.Client, engine: FakeTextEngine):
    body = {
        "messages": USER,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": True,
        "max_tokens": 2,
    }
    plain = http.post("/v1/chat/completions", json=body).json()
    ChatCompletionAnswer.model_validate(plain)
    assert plain["choices"][0]["token_ids"] == [72, 101]
    assert plain["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"
    assert plain["prompt_token_ids"] == list(b"user: hi\nassistant:")
    events = events_of(http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert [i for e in events for c in e["choices"] for i in c.get("token_ids", [])] == [72, 101]
    assert events[0]["prompt_token_ids"] == plain["prompt_token_ids"]


def test_max_completion_tokens_beats_max_tokens(client: openai.OpenAI, engine: FakeTextEngine):
    client.chat.completions.create(model="fake-model", messages=USER, max_tokens=9, max_completion_tokens=3)
    assert engine.calls[0].sampling.max_tokens == 3


def test_every_sampling_field_arrives(client: openai.OpenAI, engine: FakeTextEngine):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "prompt_logprobs": 1,
    }
    others = {"priority": 4, "cache_salt": "tenant", "request_id": "mine", "add_special_tokens": True}
    answer = client.chat.completions.create(
        model="fake-model", messages=USER, temperature=0.5, top_p=0.9, presence_penalty=0.2, frequency_penalty=0.3,
        stop="end", seed=7, logit_bias={"5": 2}, max_tokens=20, n=2, extra_body={**extra, **others},
    )  # fmt: skip
    call = engine.calls[0]
    sampling = call.sampling
    for name, value in extra.items():
        assert getattr(sampling, name) == value, name
    assert (sampling.temperature, sampling.top_p, sampling.presence_penalty, sampling.frequency_penalty) == (
        0.5,
        0.9,
        0.2,
        0.3,
    )
    assert (sampling.stop, sampling.seed, sampling.logit_bias, sampling.n) == (["end"], 7, {5: 2.0}, 2)
    assert (call.priority, call.cache_salt, call.add_special_tokens) == (4, "tenant", True)
    assert answer.id == "chatcmpl-mine"


def test_defaults_of_the_model_fill_absent_fields(http: httpx.Client, engine: FakeTextEngine):
    engine.defaults = {"temperature": 0.3, "top_k": 20, "max_tokens": 5}
    http.post("/v1/chat/completions", json={"messages": USER, "top_k": 7})
    sampling = engine.calls[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.3, 7, 5)


def test_developer_is_system_and_parts_are_joined(http: httpx.Client, engine: FakeTextEngine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert engine.calls[0].prompt == "system: rules\nuser: one\ntwo\nassistant:"


def test_an_answer_can_be_sent_back(client: openai.OpenAI):
    answer = client.chat.completions.create(model="fake-model", messages=USER).choices[0].message
    messages = [*USER, answer.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="fake-model", messages=messages).choices[0].message.content == REPLY


def test_continue_final_message_and_echo(http: httpx.Client, engine: FakeTextEngine):
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    plain = http.post("/v1/chat/completions", json=body).json()
    assert engine.calls[0].prompt == "user: hi\nassistant: Well, "
    assert plain["choices"][0]["message"]["content"] == "Well, " + REPLY
    events = events_of(http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert "".join(c["delta"].get("content", "") for e in events for c in e["choices"]) == "Well, " + REPLY


def test_template_fields(http: httpx.Client, engine: FakeTextEngine):
    body = {
        "messages": USER,
        "chat_template": "T:",
        "chat_template_kwargs": {"thinking": True},
        "add_generation_prompt": False,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.calls[0].prompt == "T:user: hi\n[('thinking', True)]\n"


def test_truncation(http: httpx.Client, engine: FakeTextEngine):
    base = {"messages": USER, "max_tokens": 10}
    http.post("/v1/chat/completions", json={**base, "truncate_prompt_tokens": 5})
    http.post("/v1/chat/completions", json={**base, "truncate_prompt_tokens": 5, "truncation_side": "right"})
    long = [{"role": "user", "content": "x" * 3000}]
    http.post("/v1/chat/completions", json={"messages": long, "max_tokens": 10, "truncate_prompt_tokens": -1})
    assert engine.calls[0].prompt == list(b"tant:")
    assert engine.calls[1].prompt == list(b"user:")
    assert len(engine.calls[2].prompt) == engine.max_model_len - 10


def test_held_back_text_sends_no_empty_event(http: httpx.Client, engine: FakeTextEngine):
    engine.script = lambda call: [
        OutputChunk(0, "", [1], prompt_token_ids=[9]),
        OutputChunk(0, "", [2]),
        OutputChunk(0, "text", [3], finish_reason="stop", stop_reason="END"),
    ]
    events = events_of(http.post("/v1/chat/completions", json={"messages": USER, "stream": True}))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "text"},
        {},
    ]
    assert events[-1]["choices"][0]["stop_reason"] == "END"


def test_an_error_before_the_first_chunk_has_its_status(client: openai.OpenAI, engine: FakeTextEngine):
    engine.script = lambda call: [OverloadedError("the queue is full")]
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="fake-model", messages=USER, stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.body["code"] == "overloaded"
        assert caught.value.response.headers["retry-after"] == "1"


def test_an_error_in_the_middle_is_an_event(http: httpx.Client, engine: FakeTextEngine):
    engine.script = lambda call: [OutputChunk(0, "a", [1], prompt_token_ids=[9]), EngineFaultError("crashed twice")]
    response = http.post("/v1/chat/completions", json={"messages": USER, "stream": True})
    assert response.status_code == 200
    events = events_of(response)
    assert events[-1] == {
        "error": {"message": "crashed twice", "type": "server_error", "param": None, "code": "engine_fault"}
    }
    assert http.post("/v1/chat/completions", json={"messages": USER}).status_code == 500


def test_the_openai_client_raises_an_error_in_the_middle(client: openai.OpenAI, engine: FakeTextEngine):
    engine.script = lambda call: [OutputChunk(0, "a", [1], prompt_token_ids=[9]), EngineFaultError("crashed twice")]
    with pytest.raises(openai.APIError, match="crashed twice"):
        list(client.chat.completions.create(model="fake-model", messages=USER, stream=True))


def test_a_fault_of_our_own_hides_its_text(
    http: httpx.Client, engine: FakeTextEngine, caplog: pytest.LogCaptureFixture
):
    engine.script = lambda call: [OutputChunk(0, "a", [1], prompt_token_ids=[9]), ZeroDivisionError("secret")]
    events = events_of(http.post("/v1/chat/completions", json={"messages": USER, "stream": True}))
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in str(events)
    assert "ZeroDivisionError" in caplog.text


def test_a_chunk_is_sent_at_once(http: httpx.Client, engine: FakeTextEngine):
    hold = Hold()
    engine.script = lambda call: [
        OutputChunk(0, "first", [1], prompt_token_ids=[9]), hold, OutputChunk(0, "last", [2], finish_reason="stop")
    ]  # fmt: skip
    with http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as response:
        lines = response.iter_lines()
        seen = ""
        while "first" not in seen:
            seen += next(lines)
        hold.release()
        assert "last" in "".join(lines)

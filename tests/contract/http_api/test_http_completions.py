"""The classic completions endpoint through the official client and raw HTTP."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from http_fake_engine import FakeTextEngine

from headrace.engine.request_output import OutputChunk
from headrace.serve.openai.completions_schema import CompletionAnswer

REPLY = "Hello, 世界 🙂!"


def post(http: httpx.Client, **body: object) -> dict:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(http: httpx.Client, **body: object) -> list[dict]:
    response = http.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    blocks = response.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


def test_default_is_16_tokens(client: openai.OpenAI, engine: FakeTextEngine):
    answer = client.completions.create(model="fake-model", prompt="Once")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert engine.calls[0].prompt == "Once"
    assert engine.calls[0].add_special_tokens is True


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_shape_of_prompt(client: openai.OpenAI, engine: FakeTextEngine, prompt, expected):
    answer = client.completions.create(model="fake-model", prompt=prompt, max_tokens=2)
    assert [call.prompt for call in engine.calls] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))


def test_choices_of_several_prompts_with_n(http: httpx.Client):
    answer = post(http, prompt=["a", "b"], n=2, max_tokens=40)
    CompletionAnswer.model_validate(answer)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, REPLY), (1, REPLY + "1"), (2, REPLY), (3, REPLY + "1")
    ]  # fmt: skip
    # A prompt counts once, however many outputs it has.
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 4 * len(REPLY.encode()) + 2


def test_stream_equals_plain_answer(http: httpx.Client):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 40, "echo": True, "logprobs": 2, "return_token_ids": True}
    plain = post(http, **body)
    built = [{"text": "", "logprobs": {}, "token_ids": []} for _ in range(4)]
    for event in events_of(http, **body):
        for choice in event["choices"]:
            CompletionAnswer.model_validate(event)
            target = built[choice["index"]]
            target["text"] += choice["text"]
            for name, items in (choice["logprobs"] or {}).items():
                target["logprobs"].setdefault(name, []).extend(items)
            target["token_ids"] += choice.get("token_ids", [])
            target["finish_reason"] = choice["finish_reason"]
    for choice, target in zip(plain["choices"], built, strict=True):
        assert {name: choice[name] for name in target} == target


def test_stream_ends_with_reason_and_usage(http: httpx.Client):
    events = events_of(http, prompt="a", max_tokens=2, stream_options={"include_usage": True})
    assert [choice["text"] for event in events for choice in event["choices"]] == ["H", "e", ""]
    assert [choice["finish_reason"] for event in events for choice in event["choices"]] == [None, None, "length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 4
    assert all(event["usage"] is None for event in events[:-1])


def test_echo_with_logprobs_has_the_classic_shape(client: openai.OpenAI):
    """This is what evaluation harnesses use to score a text."""
    answer = client.completions.create(model="fake-model", prompt="hi é", echo=True, logprobs=2, max_tokens=1)
    choice = answer.choices[0]
    assert choice.text == "hi éH"
    logprobs = choice.logprobs
    assert logprobs.tokens == ["<bos>", "h", "i", " ", r"bytes:\xc3", r"bytes:\xa9", "H"]
    assert logprobs.token_logprobs == [None] + [-0.5] * 6
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {"h": -0.5, "i": -1.5}
    # The special token takes no room in the text, and a character counts once it is complete.
    assert logprobs.text_offset == [0, 0, 1, 2, 3, 3, 4]
    for token, offset in zip(logprobs.tokens[1:4], logprobs.text_offset[1:4], strict=True):
        assert choice.text[offset] == token


def test_echo_of_token_ids_is_their_text(http: httpx.Client):
    assert post(http, prompt=[256, 104, 105], echo=True, max_tokens=1)["choices"][0]["text"] == "hiH"


def test_logprobs_zero_has_only_the_chosen_token(http: httpx.Client):
    logprobs = post(http, prompt="a", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["H"], "token_logprobs": [-0.5], "top_logprobs": [{"H": -0.5}], "text_offset": [0]}


def test_prompt_logprobs(http: httpx.Client):
    shown = post(http, prompt="ab", prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    assert shown[1] == {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}


def test_best_of_equal_to_n_is_accepted(http: httpx.Client):
    assert len(post(http, prompt="a", n=2, best_of=2)["choices"]) == 2


def test_truncate_keeps_the_end(http: httpx.Client, engine: FakeTextEngine):
    post(http, prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2)
    assert [call.prompt for call in engine.calls] == [[2, 3], [4]]


def test_infinite_logprob_is_valid_json(http: httpx.Client, engine: FakeTextEngine):
    entry = engine.entry(72, 1)
    entry.logprob = float("-inf")
    engine.script = lambda call: [
        OutputChunk(0, "H", [72], logprobs=[entry], prompt_token_ids=[1], finish_reason="length")
    ]
    assert post(http, prompt="a", logprobs=0)["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_one_failing_prompt_fails_the_request_and_closes_the_others(http: httpx.Client, engine: FakeTextEngine):
    from http_fake_engine import Hold

    from headrace.base.errors import RequestError

    engine.script = lambda call: [Hold()] if call.prompt == "good" else [RequestError("bad prompt", param="prompt")]
    response = http.post("/v1/completions", json={"prompt": ["good", "bad"]})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "bad prompt")
    assert all(call.closed.wait(5) for call in engine.calls)

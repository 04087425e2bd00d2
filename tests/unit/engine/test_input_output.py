"""Input and output processing on the byte tokenizer, without a core."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_device import EOS, VOCAB, expected_tokens

from headrace.base.errors import ContextLengthError, NeverFitsError, NumericalError, RequestError
from headrace.base.ids import RequestId
from headrace.config import ModelConfig
from headrace.engine.input_processor import InputProcessor, ProcessedPrompt
from headrace.engine.output_processor import SequenceOutput
from headrace.engine.request_output import CompletionOutput, OutputChunk
from headrace.engine.text_parts import TextParts, load_text_parts
from headrace.kv.budget import fixed_layout
from headrace.kv.prefix_hash import HashExtras, block_hashes, root_of
from headrace.types.cache_specs import FullAttentionSpec, LayerCache
from headrace.types.error_records import record_of
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.requests import EngineRequest
from headrace.types.results import TokenLogprobs
from headrace.types.sampling import SamplingParams
from headrace.types.wire import CoreReady

LENGTH = 64


@pytest.fixture(scope="module")
def parts(model_dir: Path) -> TextParts:
    return load_text_parts(ModelConfig(model=str(model_dir), load_format="dummy"))


def _ready(num_blocks: int = 100) -> CoreReady:
    layout = fixed_layout([LayerCache(0, FullAttentionSpec(1, 8, 8, 4))], block_tokens=8, usable_blocks=num_blocks - 1)
    capacity = 8 * (num_blocks - 1)
    return CoreReady(
        pid=1,
        max_model_len=LENGTH,
        vocab_tokens=VOCAB,
        block_tokens=8,
        layout=layout,
        hash_tokens=8,
        capacity_tokens=capacity,
    )


def _process(parts: TextParts, prompt: Any, ready: CoreReady | None = None, **sampling: Any) -> ProcessedPrompt:
    inputs = InputProcessor(parts.tokenizer, ready or _ready(), parts.eos_token_ids)
    salt = sampling.pop("cache_salt", None)
    parameters = SamplingParams(**{"max_tokens": 5, **sampling})
    return inputs.process(prompt, parameters, request_id="r", arrival_s=1.0, cache_salt=salt)


def test_requests_of_a_text(parts: TextParts) -> None:
    prompt = "the prompt of a request"
    processed = _process(parts, prompt, n=3, seed=10, cache_salt="tenant")
    assert processed.text == prompt
    assert [request.request_id for request in processed.requests] == ["r:0", "r:1", "r:2"]
    assert [request.sampling.seed for request in processed.requests] == [10, 11, 12]
    assert {request.sampling.n for request in processed.requests} == {1}
    request = processed.requests[0]
    assert request.prompt_token_ids == list(prompt.encode())
    assert request.eos_token_ids == [EOS]
    assert request.block_hashes == block_hashes(request.prompt_token_ids, 8, extras=HashExtras(salt="tenant"))
    assert len(request.block_hashes) == 2


def test_siblings_wait_for_the_first_one(parts: TextParts) -> None:
    leaders = [request.leader_id for request in _process(parts, "abc", n=3).requests]
    assert leaders == [None, "r:0", "r:0"]
    assert _process(parts, "abc").requests[0].leader_id is None
    # Nobody who wants the logits of the whole prompt can start from cached KV, so nobody waits for it.
    scored = _process(parts, "abc", n=2, prompt_logprobs=0).requests
    assert [request.leader_id for request in scored] == [None, None]


def test_tenant_and_deadline_are_those_of_all_siblings(parts: TextParts) -> None:
    inputs = InputProcessor(parts.tokenizer, _ready(), parts.eos_token_ids)
    processed = inputs.process(
        "abc", SamplingParams(n=2), request_id="r", arrival_s=1.0, tenant="t", deadline_s=9.0, priority=3
    )
    assert [(r.tenant, r.deadline_s, r.priority, r.arrival_s) for r in processed.requests] == [("t", 9.0, 3, 1.0)] * 2


def test_prompt_hashes_begin_at_the_configured_seed(parts: TextParts) -> None:
    prompt = list(b"sixteen bytes and more")
    hashes = {}
    for seed in ("", "one", "two"):
        inputs = InputProcessor(parts.tokenizer, _ready(), parts.eos_token_ids, hash_seed=seed)
        (request,) = inputs.process(prompt, SamplingParams(), request_id="r", arrival_s=0.0).requests
        hashes[seed] = request.block_hashes
        assert request.block_hashes == block_hashes(prompt, 8, root=root_of(seed))
    assert len({tuple(chain) for chain in hashes.values()}) == 3


def test_seeds(parts: TextParts) -> None:
    assert _process(parts, "a", seed=-1, n=2).requests[1].sampling.seed == 0
    drawn = {_process(parts, "a").requests[0].sampling.seed for _ in range(5)}
    assert len(drawn) == 5
    assert None not in drawn


def test_max_tokens_fills_and_limits(parts: TextParts) -> None:
    assert _process(parts, "abcd", max_tokens=None).sampling.max_tokens == LENGTH - 4
    assert _process(parts, "abcd", max_tokens=LENGTH - 4).sampling.max_tokens == LENGTH - 4
    with pytest.raises(ContextLengthError, match=r"together 65.*at most 60"):
        _process(parts, "abcd", max_tokens=LENGTH - 3)
    with pytest.raises(ContextLengthError, match=r"64 tokens.*at most 63"):
        _process(parts, "a" * LENGTH)
    with pytest.raises(ContextLengthError, match="min_tokens"):
        _process(parts, "a" * 60, max_tokens=None, min_tokens=5)
    assert _process(parts, "abcd", _ready(2), max_tokens=5).requests
    with pytest.raises(NeverFitsError, match="need KV for 9, but the whole cache holds 8 tokens"):
        _process(parts, "abcd", _ready(2), max_tokens=6)


def test_a_long_text_is_refused_before_it_is_tokenised(parts: TextParts, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = InputProcessor(parts.tokenizer, _ready(), ())
    inputs.prepare()
    assert parts.tokenizer is not None
    monkeypatch.setattr(parts.tokenizer, "encode", lambda *a, **k: pytest.fail("tokenised"))
    with pytest.raises(ContextLengthError, match="10000000 characters"):
        inputs.tokenize("x" * 10_000_000)
    plain = SamplingParams()
    assert not inputs.is_quick("x" * 10_000_000, plain)
    assert not inputs.is_quick("x", plain.replace(bad_words=["y" * 10_000]))
    assert inputs.is_quick("x" * 100, plain)
    with pytest.raises(ContextLengthError, match="1000000 tokens"):
        inputs.process(["not looked at"] * 1_000_000, plain, request_id="r", arrival_s=0.0)  # type: ignore[list-item]


@pytest.mark.parametrize("salt", ["\ud800", 5])
def test_a_salt_that_has_no_bytes_is_refused_by_name(parts: TextParts, salt: Any) -> None:
    inputs = InputProcessor(parts.tokenizer, _ready(), parts.eos_token_ids)
    with pytest.raises(RequestError, match="cache_salt") as caught:
        inputs.process("abc", SamplingParams(), request_id="r", arrival_s=0.0, cache_salt=salt)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [True], [1.5], ["a"], "\ud800"])
def test_bad_prompts(parts: TextParts, prompt: Any) -> None:
    with pytest.raises(RequestError):
        _process(parts, prompt)


def test_without_a_tokenizer_only_ids_pass() -> None:
    inputs = InputProcessor(None, _ready(), ())
    plain = SamplingParams(max_tokens=5)
    assert inputs.process([1, 2], plain, request_id="r", arrival_s=0.0).token_ids == [1, 2]
    with pytest.raises(RequestError, match="needs a tokenizer"):
        inputs.process("text", plain, request_id="r", arrival_s=0.0)
    with pytest.raises(RequestError, match="bad_words"):
        inputs.process([1], plain.replace(bad_words=["x"]), request_id="r", arrival_s=0.0)
    with pytest.raises(RequestError, match="stop string"):
        inputs.process([1], plain.replace(stop=["x"]), request_id="r", arrival_s=0.0)


def test_bad_words_inside_and_at_the_beginning_of_words(parts: TextParts) -> None:
    request = _process(parts, "a", bad_words=["no", " no", "x y"]).requests[0]
    assert request.bad_words_token_ids == [list(b"no"), list(b" no"), list(b"x y"), list(b" x y")]


# Output.


def _output(parts: TextParts, prompt: bytes = b"p", **sampling: Any) -> SequenceOutput:
    parameters = SamplingParams(**{"max_tokens": 500, "seed": 0, **sampling})
    request = EngineRequest(
        request_id=RequestId("r"), prompt_token_ids=list(prompt), sampling=parameters, arrival_s=1.0
    )
    return SequenceOutput(request, 0, parts.tokenizer)


def _deltas(tokens: list[int], sizes: random.Random, finish: FinishReason, stop: int | None) -> list[RequestDelta]:
    deltas, at = [], 0
    while at < len(tokens):
        size = min(sizes.randint(1, 4), len(tokens) - at)
        last = at + size == len(tokens)
        deltas.append(
            RequestDelta(
                request_id=RequestId("r"),
                new_token_ids=tokens[at : at + size],
                logprobs=[TokenLogprobs(token, -0.5, 1, [token], [-0.5]) for token in tokens[at : at + size]],
                finish_reason=finish if last else None,
                stop_token_id=stop if last else None,
            )
        )
        at += size
    return deltas


def _result(output: SequenceOutput, deltas: list[RequestDelta]) -> tuple[CompletionOutput, list[OutputChunk]]:
    result = CompletionOutput(0)
    chunks = []
    for delta in deltas:
        chunk = output.push(delta)
        if chunk is not None:
            chunks.append(chunk)
            result.add(chunk)
    return result, chunks


def test_streamed_text_equals_whole_text_over_random_chunkings(parts: TextParts) -> None:
    assert parts.tokenizer is not None
    for seed in range(60):
        source = random.Random(seed)
        tokens = expected_tokens(b"%d" % seed, source.randint(1, 90))
        whole = bytes(tokens).decode(errors="replace")
        result, _ = _result(_output(parts), _deltas(tokens, source, FinishReason.LENGTH, None))
        assert result.text == whole == parts.tokenizer.decode(tokens)
        assert result.token_ids == tokens
        assert result.finish_reason == "length"


def test_stop_strings_do_not_depend_on_chunking_and_cut_everything(parts: TextParts) -> None:
    seen = 0
    for seed in range(120):
        source = random.Random(seed)
        tokens = expected_tokens(b"s%d" % seed, 90)
        whole = bytes(tokens).decode(errors="replace")
        at = source.randrange(len(whole) - 4)
        stops = [whole[at : at + source.randint(1, 4)], "never there"]
        end = whole.index(stops[0]) + len(stops[0])
        include = bool(seed % 2)
        output = _output(parts, stop=stops, include_stop_str_in_output=include, logprobs=0)
        result, _ = _result(output, _deltas(tokens, source, FinishReason.LENGTH, None))
        if "\ufffd" in stops[0]:
            continue
        seen += 1
        assert result.text == whole[: end if include else end - len(stops[0])]
        assert bytes(result.token_ids).decode() == whole[:end]
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        assert output.output_tokens == len(result.token_ids)
        assert (result.finish_reason, result.stop_reason) == ("stop", stops[0])
    assert seen > 80


def test_nothing_follows_a_stop_string(parts: TextParts) -> None:
    output = _output(parts, stop=["b"])
    chunk = output.push(RequestDelta(request_id=RequestId("r"), new_token_ids=list(b"abc")))
    assert chunk is not None
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("a", list(b"ab"), "stop")
    assert output.stopped_here
    late = RequestDelta(request_id=RequestId("r"), new_token_ids=list(b"x"), finish_reason=FinishReason.LENGTH)
    assert output.push(late) is None


def test_a_stop_string_in_the_last_delta_needs_no_abort(parts: TextParts) -> None:
    output = _output(parts, stop=["b"])
    output.push(RequestDelta(request_id=RequestId("r"), new_token_ids=list(b"ab"), finish_reason=FinishReason.LENGTH))
    assert output.finished
    assert not output.stopped_here


def test_held_back_text_comes_out_at_the_end(parts: TextParts) -> None:
    output = _output(parts, stop=["bcd"])
    first = output.push(RequestDelta(request_id=RequestId("r"), new_token_ids=list(b"abc")))
    assert first is not None
    assert first.text == "a"
    assert first.token_ids == list(b"abc")
    last = output.push(
        RequestDelta(request_id=RequestId("r"), new_token_ids=list(b"x"), finish_reason=FinishReason.LENGTH)
    )
    assert last is not None
    assert last.text == "bcx"


def test_min_tokens_keeps_stop_strings_away(parts: TextParts) -> None:
    tokens = list(b"ababab")
    output = _output(parts, stop=["ab"], min_tokens=3)
    result, _ = _result(output, _deltas(tokens, random.Random(0), FinishReason.LENGTH, None))
    assert result.text == "abab"[:3] + "b"
    assert result.token_ids == tokens


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({}, "ab", None),
        ({"stop_token_ids": [EOS]}, "ab", EOS),
        ({"include_stop_str_in_output": True}, "ab", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab<|eos|>", None),
    ],
)
def test_end_of_sequence(parts: TextParts, options: dict[str, Any], text: str, reason: int | None) -> None:
    output = _output(parts, **options)
    result, _ = _result(output, _deltas([97, 98, EOS], random.Random(1), FinishReason.STOP, EOS))
    assert result.text == text
    assert result.token_ids == [97, 98, EOS]
    assert (result.finish_reason, result.stop_reason) == ("stop", reason)


def test_ids_only(parts: TextParts) -> None:
    result, _ = _result(
        _output(parts, detokenize=False), _deltas([97, 98], random.Random(1), FinishReason.LENGTH, None)
    )
    assert (result.text, result.token_ids) == ("", [97, 98])


def test_first_chunk_has_the_prompt_and_waits_for_a_token(parts: TextParts) -> None:
    output = _output(parts, b"xyz", prompt_logprobs=1, logprobs=1)
    entry = TokenLogprobs(121, -1.0, 2, [122, 121], [-0.1, -1.0])
    early = RequestDelta(request_id=RequestId("r"), prompt_logprobs=[entry], first_scheduled_s=1.25)
    assert output.push(early) is None
    chunk = output.push(
        RequestDelta(request_id=RequestId("r"), new_token_ids=[97], prompt_logprobs=[entry], logprobs=[entry])
    )
    assert chunk is not None
    assert chunk.prompt_token_ids == list(b"xyz")
    assert chunk.prompt_logprobs is not None
    assert chunk.prompt_logprobs[0] is None
    assert len(chunk.prompt_logprobs) == 3
    assert chunk.queued_s == 0.25
    first = chunk.prompt_logprobs[1]
    assert first is not None
    assert (first.text, first.bytes, first.rank, first.top) == (
        "y", b"y", 2, [(122, "z", b"z", -0.1), (121, "y", b"y", -1.0)],
    )  # fmt: skip


def test_an_error_delta_raises_its_class(parts: TextParts) -> None:
    delta = RequestDelta(
        request_id=RequestId("r"), finish_reason=FinishReason.ERROR, error=record_of(NumericalError("NaN"))
    )
    output = _output(parts)
    with pytest.raises(NumericalError, match="NaN"):
        output.push(delta)
    assert output.finished

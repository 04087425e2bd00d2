"""Token ids as arrays, and their way over the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ProtocolError
from headrace.base.ids import RequestId
from headrace.types.events import AddRequest
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams
from headrace.types.token_ids import decode_tokens, encode_tokens, token_array
from headrace.types.wire import PACKED_FROM_TOKENS, decode_to_core, encode


def add(token_ids: list[int]) -> AddRequest:
    return AddRequest(
        EngineRequest(request_id=RequestId("r"), prompt_token_ids=token_ids, sampling=SamplingParams(seed=1))
    )


def over_the_wire(message: AddRequest) -> EngineRequest:
    answer = decode_to_core(encode(message))
    assert isinstance(answer, AddRequest)
    return answer.request


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_an_array_comes_back_from_its_bytes(token_ids: list[int]) -> None:
    data = encode_tokens(token_array(token_ids))
    assert data == b"".join(token.to_bytes(4, "little") for token in token_ids)
    assert list(decode_tokens(data)) == token_ids


@pytest.mark.parametrize("wrong", [[-1], [2**32]])
def test_ids_that_take_more_than_four_bytes_are_refused(wrong: list[int]) -> None:
    with pytest.raises(OverflowError):
        token_array(wrong)


def test_lists_stay_lists_and_torn_bytes_are_a_protocol_error() -> None:
    assert decode_tokens([1, 2]) == [1, 2]
    with pytest.raises(ProtocolError, match="5 bytes"):
        decode_tokens(b"12345")
    with pytest.raises(NotImplementedError, match="set has no wire form"):
        encode_tokens({1})


@pytest.mark.parametrize("tokens", [1, PACKED_FROM_TOKENS - 1, PACKED_FROM_TOKENS, 1000])
def test_prompts_of_any_length_reach_the_core(tokens: int) -> None:
    prompt = [(7919 * place) % 150_000 for place in range(tokens)]
    request = over_the_wire(add(prompt))
    assert list(request.prompt_token_ids) == prompt
    assert msgspec.structs.replace(request, prompt_token_ids=prompt) == add(prompt).request


def test_a_long_prompt_takes_four_bytes_a_token() -> None:
    assert len(encode(add([100_000] * 10_000))) < 4.1 * 10_000


def test_ids_that_have_no_array_travel_as_they_are_and_are_refused_there() -> None:
    prompt = [1] * PACKED_FROM_TOKENS + [-1]
    assert over_the_wire(add(prompt)).prompt_token_ids == prompt

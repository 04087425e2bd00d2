"""The validation table of SamplingParams: each field at its limits, just outside, and of a wrong type."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import SamplingParams
from headrace.base.errors import RequestError

BIG = 10**400  # has no float and no 64-bit form

REFUSED = [
    ("n", [0, -1, 129, 1.0, True, "1", None, BIG]),
    ("temperature", [-0.1, 100.1, math.nan, math.inf, "hot", None, True, BIG]),
    ("top_k", [-2, 2**31, 1.5, "5", None, BIG]),
    ("top_p", [0.0, -0.1, 1.01, math.nan, "1", None]),
    ("min_p", [-0.1, 1.1, math.nan, None]),
    ("repetition_penalty", [0.0, -1.0, math.inf, math.nan, "x", None]),
    ("presence_penalty", [-2.1, 2.1, math.nan, None]),
    ("frequency_penalty", [-2.1, 2.1, math.inf, None]),
    ("logit_bias", [{-1: 1.0}, {"5": 1.0}, {5: math.nan}, {5: -math.inf}, {5: "x"}, {True: 1.0}, {5: BIG}, [5]]),
    ("allowed_token_ids", [[], [-1], ["a"], 5, [True], [BIG]]),
    ("bad_words", [[""], "word", [1], None, ["a", "\ud800"]]),
    ("max_tokens", [0, -1, 2**31, 1.5, "9", False]),
    ("min_tokens", [-1, 17, 0.5, None]),
    ("stop", [[""], "stop", [7], ["x"] * 65, None, ["end", "\udfff."]]),
    ("stop_token_ids", [[-1], ["x"], 5, [1.0], None, [BIG]]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1", BIG]),
    ("logprobs", [-1, 101, True, "1"]),
    ("prompt_logprobs", [-1, 101, True, "1"]),
    ("ignore_eos", [1, None, "yes"]),
    ("skip_special_tokens", [1, None]),
    ("spaces_between_special_tokens", [0, None]),
    ("include_stop_str_in_output", [1, None]),
    ("detokenize", [1, None]),
]
ACCEPTED = [
    ("n", [1, 128]),
    ("temperature", [0, 0.0, 1e-6, 100.0]),
    ("top_k", [-1, 0, 1, 2**31 - 1]),
    ("top_p", [1e-9, 1, 1.0]),
    ("min_p", [0, 0.5, 1.0]),
    ("repetition_penalty", [1e-3, 1, 2.0]),
    ("presence_penalty", [-2, 2.0]),
    ("frequency_penalty", [-2, 2.0]),
    ("logit_bias", [None, {}, {0: -100, 5: 100.0}]),
    ("allowed_token_ids", [None, [0], [5, 6]]),
    ("bad_words", [[], ["a", "b c"]]),
    ("max_tokens", [None, 1, 2**31 - 1]),
    ("min_tokens", [0, 16]),
    ("stop", [[], ["a"] * 64]),
    ("stop_token_ids", [[], [0, 2**31 - 1]]),
    ("seed", [None, 0, -1, 2**63 - 1, -(2**63)]),
    ("logprobs", [None, 0, 100]),
    ("prompt_logprobs", [None, 0, 100]),
    ("ignore_eos", [True]),
    ("skip_special_tokens", [False]),
    ("spaces_between_special_tokens", [False]),
    ("include_stop_str_in_output", [True]),
    ("detokenize", [False]),
]


def test_the_tables_cover_every_field():
    fields = sorted(SamplingParams.__struct_fields__)
    assert sorted(name for name, _ in REFUSED) == fields
    assert sorted(name for name, _ in ACCEPTED) == fields


@pytest.mark.parametrize(("name", "values"), REFUSED, ids=[name for name, _ in REFUSED])
def test_refused_values_name_the_field(name, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name, value
        assert name in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("name", "values"), ACCEPTED, ids=[name for name, _ in ACCEPTED])
def test_accepted_values_are_kept(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_a_huge_value_gives_a_short_message():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop="x" * 10_000_000)
    assert len(str(caught.value)) < 300


def test_min_tokens_against_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    with pytest.raises(RequestError, match="max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)


def test_greedy():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_replace_validates_again_and_leaves_the_original_alone():
    params = SamplingParams(n=4)
    assert params.replace(n=1, seed=7) == SamplingParams(seed=7)
    assert params.n == 4
    with pytest.raises(RequestError):
        params.replace(n=0)


def test_frozen_and_no_shared_defaults():
    first, second = SamplingParams(), SamplingParams()
    with pytest.raises(AttributeError):
        first.n = 2
    first.stop.append("x")
    assert second.stop == []


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_every_field_is_documented():
    for name in SamplingParams.__struct_fields__:
        assert f"\n        {name}: " in SamplingParams.__doc__


def test_every_accepted_value_survives_msgpack():
    for name, values in ACCEPTED:
        for value in values:
            params = SamplingParams(**{name: value})
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(SCALARS, SCALARS, max_size=3)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), VALUES, max_size=4))
def test_any_value_is_kept_or_refused_with_a_typed_error(values):
    try:
        params = SamplingParams(**values)
    except RequestError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import ModelSourceError
from headrace.text.generation_defaults import sampling_defaults
from headrace.types.sampling import SamplingParams


def test_known_keys_become_sampling_fields_and_do_sample_is_ignored() -> None:
    config = {
        "do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None, "repetition_penalty": 1.05,
        "max_new_tokens": 512, "eos_token_id": [1, 2], "transformers_version": "4.0", "num_beams": 3,
    }  # fmt: skip
    found = sampling_defaults(config)
    assert found == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 512}
    assert SamplingParams(**found).top_k == 20
    assert sampling_defaults({}) == {}


def test_whole_numbers_are_read_as_floats_and_back() -> None:
    found = sampling_defaults({"temperature": 1, "top_k": 50.0})
    assert found == {"temperature": 1.0, "top_k": 50}
    assert isinstance(found["temperature"], float)
    assert isinstance(found["top_k"], int)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"top_p": 0}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"min_p": True}, "min_p"),
    ],
)
def test_bad_values_name_the_key_and_the_way_out(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelSourceError, match=text):
        sampling_defaults(config)

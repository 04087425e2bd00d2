from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

PIECES = [
    "Hello",
    " world",
    "中文测试",
    "😀👩‍👩‍👧",
    "🦀",
    "é",
    "\n\n",
    "  ",
    " 12",
    "<|im_end|>",
    "ﷺ",
    "a" * 20,
    "𝔘",
    "\u200b",
    "naïve",
]


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)]
    return "".join(pieces) + detokenizer.finish()


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.sampled_from(PIECES), max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=30),
    skip=st.booleans(),
)
def test_texts_streamed_in_any_pieces_equal_the_whole(
    smollm: Tokenizer, words: list[str], cuts: list[int], skip: bool
) -> None:
    ids = smollm.encode("".join(words))
    assert stream(smollm, ids, cuts, [], skip) == smollm.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 280)), max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=30),
    skip=st.booleans(),
)
def test_random_tokens_with_invalid_bytes_streamed_equal_the_whole(
    smollm: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    assert stream(smollm, ids, cuts, [], skip) == smollm.decode(ids, skip)
    one_by_one = stream(smollm, ids, list(range(len(ids))), [], skip)
    assert one_by_one == smollm.decode(ids, skip)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, 500), max_size=20), cuts=st.lists(st.integers(0, 40), max_size=20), skip=st.booleans()
)
def test_sentencepiece_streamed_equals_the_whole(
    sentencepiece: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    assert stream(sentencepiece, ids, cuts, [], skip) == sentencepiece.decode(ids, skip)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.sampled_from(["the theory", "中文", "x ", "🦀", "<s>a"]),
    output=st.sampled_from(["the other", "你好", "☃ x", "🦀"]),
)
def test_in_its_context_the_output_continues_the_prompt(sentencepiece: Tokenizer, prompt: str, output: str) -> None:
    prompt_ids = sentencepiece.encode(prompt)
    output_ids = sentencepiece.encode(output, add_special_tokens=False)
    whole = sentencepiece.decode(prompt_ids + output_ids)
    assert sentencepiece.decode(prompt_ids) + stream(sentencepiece, output_ids, list(range(9)), prompt_ids) == whole
    assert whole == sentencepiece.decode(prompt_ids) + " " + output


def test_a_prompt_of_special_tokens_only_is_no_context(sentencepiece: Tokenizer) -> None:
    output = sentencepiece.encode("the", add_special_tokens=False)
    assert stream(sentencepiece, output, [], [1]) == "the"
    assert stream(sentencepiece, output, [], []) == "the"
    assert stream(sentencepiece, output, [], [1], skip=False) == " the"


def test_a_character_that_the_prompt_began_is_completed(smollm: Tokenizer) -> None:
    ids = smollm.encode("🦀!")
    for cut in range(1, len(ids) - 1):
        prompt, output = smollm.encode("x") + ids[:cut], ids[cut:]
        assert stream(smollm, output, [], prompt) == "🦀!"


def test_a_split_character_waits_and_is_replaced_at_the_end(smollm: Tokenizer) -> None:
    ids = smollm.encode("🦀")
    detokenizer = IncrementalDetokenizer(smollm, [], True)
    assert [detokenizer.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🦀"]
    detokenizer = IncrementalDetokenizer(smollm, [], True)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_each_token_costs_the_same_late_and_early(smollm: Tokenizer) -> None:
    ids = smollm.encode("The quick brown fox. ")[:4]
    detokenizer = IncrementalDetokenizer(smollm, list(range(100, 200)) * 50, True)

    def seconds(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            detokenizer.push(ids)
        return time.process_time() - start

    seconds(1000)
    early = min(seconds(2000) for _ in range(3))
    for _ in range(5):
        seconds(2000)
    late = min(seconds(2000) for _ in range(3))
    assert late < 3 * early

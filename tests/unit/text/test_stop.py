from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


def naive(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by one character until a stop is complete."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def feed(matcher: StopMatcher, pieces: Sequence[str]) -> tuple[str, str | None]:
    emitted, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted += text
    return emitted + matcher.flush(), matched


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=1500, deadline=None)
@given(
    text=st.text(alphabet="ab\n😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab\n😀", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=12),
    include=st.booleans(),
)
def test_any_chunking_equals_the_naive_search(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    assert feed(StopMatcher(stops, include), cut(text, cuts)) == naive(text, stops, include)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, False)
    emitted = 0
    for position, character in enumerate(text, 1):
        out, matched = matcher.push(character)
        if matched is not None:
            return
        emitted += len(out)
        held = text[emitted:position]
        assert len(held) < max(map(len, stops))
        assert not held or any(stop.startswith(held) for stop in stops)


def test_ties_go_to_the_first_of_the_list_and_earlier_completion_wins() -> None:
    assert feed(StopMatcher(["b", "ab"], False), ["xab"]) == ("xa", "b")
    assert feed(StopMatcher(["ab", "b"], False), ["xab"]) == ("x", "ab")
    assert feed(StopMatcher(["abcd", "bc"], False), ["xabcd"]) == ("xa", "bc")


def test_after_a_match_nothing_more_comes() -> None:
    matcher = StopMatcher(["."], True)
    assert matcher.push("a.b") == ("a.", ".")
    assert matcher.push("c") == ("", ".")
    assert matcher.flush() == ""


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([], False)
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("include", [True, False])
def test_stops_that_straddle_tokens(smollm: Tokenizer, include: bool) -> None:
    text = "One two.\n\nUser: hello 中文😀 and more"
    ids = smollm.encode(text)
    for stop in ("\n\nUser", ".\n", "o 中", "文😀 a", "😀"):
        detokenizer, matcher = IncrementalDetokenizer(smollm, [], True), StopMatcher([stop], include)
        emitted, matched = "", None
        for token in ids:
            out, matched = matcher.push(detokenizer.push([token]))
            emitted += out
            if matched is not None:
                break
        assert matched == stop
        assert emitted == text[: text.index(stop) + (len(stop) if include else 0)]


def test_long_repetitive_stops_stay_quick() -> None:
    stop = "a" * 5000 + "b"
    matcher = StopMatcher([stop], False)
    for _ in range(2000):
        matcher.push("aaa")
    assert matcher.push("b")[1] == stop

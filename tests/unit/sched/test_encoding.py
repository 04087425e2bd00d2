"""The encoder's share of a step: whole items, a cut before what does not fit, and never a step of nothing for ever."""

import pytest

from headrace.base.errors import MediaTooLargeError, RequestError
from headrace.sched.encoding import EncoderFit, EncoderGate
from headrace.types.plans import EncodeItem
from headrace.types.requests import MediaSpan

A = MediaSpan("a", start=10, tokens=20, rows=20)
B = MediaSpan("b", start=40, tokens=20, rows=20)


def _prefill(gate: EncoderGate, media: list[MediaSpan], prompt_tokens: int, chunk_tokens: int) -> list[int]:
    """Run one request to the end of its prompt and return where its chunks end."""
    start, ends = 0, []
    for _ in range(300):
        fit = gate.fit("r", media, start, min(chunk_tokens, prompt_tokens - start))
        if fit.tokens:
            gate.take("r", 0, media, fit)
            start += fit.tokens
            ends.append(start)
        gate.close_step()
        gate.advance("r", media, start)
        if start == prompt_tokens:
            return ends
    raise AssertionError(f"stuck at {start}: {ends}")


def test_a_row_without_media_in_its_range_is_free() -> None:
    gate = EncoderGate(cache_rows=20, budget_rows=20)
    assert gate.fit("r", [A], 0, 10) == EncoderFit(10)
    assert gate.fit("r", [A], 30, 5) == EncoderFit(5)


def test_touching_one_position_costs_the_whole_item() -> None:
    gate = EncoderGate(cache_rows=30, budget_rows=30)
    fit = gate.fit("r", [A, B], 0, 11)
    assert fit == EncoderFit(11, (0,))
    gate.take("r", 3, [A, B], fit)
    assert gate.cache.used_rows == 20
    work = gate.close_step()
    assert work.encodes == [EncodeItem(3, "r", 0, "a")]
    assert work.frees == []
    # The next chunk of the same item costs nothing.
    assert gate.fit("r", [A, B], 11, 19) == EncoderFit(19)


def test_the_chunk_is_cut_before_the_item_that_does_not_fit() -> None:
    gate = EncoderGate(cache_rows=100, budget_rows=30)
    assert gate.fit("r", [A, B], 0, 100) == EncoderFit(40, (0,))
    small = EncoderGate(cache_rows=30, budget_rows=100)
    assert small.fit("r", [A, B], 0, 100) == EncoderFit(40, (0,))


def test_asking_changes_nothing() -> None:
    gate = EncoderGate(cache_rows=100, budget_rows=40)
    for _ in range(3):
        assert gate.fit("r", [A, B], 0, 100) == EncoderFit(100, (0, 1))
    assert gate.cache.used_rows == 0
    assert gate.close_step().encodes == []


def test_the_budget_is_shared_by_the_requests_of_a_step_and_new_in_the_next() -> None:
    gate = EncoderGate(cache_rows=100, budget_rows=30)
    gate.take("r0", 0, [A], gate.fit("r0", [A], 0, 40))
    other = [MediaSpan("c", 5, 20, 20)]
    assert gate.fit("r1", other, 0, 40) == EncoderFit(5)
    assert gate.fit("r1", other, 5, 40).tokens == 0
    # An output that is there already needs none of it, nor one that this step encodes for somebody else.
    assert gate.fit("r2", [A], 0, 40) == EncoderFit(40, (0,))
    gate.close_step()
    assert gate.fit("r1", other, 5, 40) == EncoderFit(40, (0,))


def test_a_hit_that_ends_inside_an_item_still_needs_it() -> None:
    gate = EncoderGate(cache_rows=20, budget_rows=20)
    assert gate.fit("r", [A], 25, 10) == EncoderFit(10, (0,))


def test_the_same_item_twice_in_one_chunk_is_encoded_once_and_held_twice() -> None:
    media = [MediaSpan("a", 0, 10, 10), MediaSpan("a", 20, 10, 10)]
    gate = EncoderGate(cache_rows=10, budget_rows=10)
    fit = gate.fit("r", media, 0, 40)
    assert fit == EncoderFit(40, (0, 1))
    gate.take("r", 0, media, fit)
    assert gate.close_step().encodes == [EncodeItem(0, "r", 0, "a")]
    gate.advance("r", media, 15)
    assert gate.cache.used_rows == 10
    gate.advance("r", media, 30)
    assert gate.cache.used_rows == 0


def test_items_go_after_confirmed_progress_only() -> None:
    gate = EncoderGate(cache_rows=20, budget_rows=20)
    gate.take("r", 0, [A], gate.fit("r", [A], 0, 40))
    gate.close_step()
    gate.advance("r", [A], 29)
    assert gate.cache.used_rows == 20
    assert gate.fit("s", [MediaSpan("c", 0, 5, 5)], 0, 5).tokens == 0
    gate.advance("r", [A], 30)
    assert gate.cache.used_rows == 0


def test_a_drafter_keeps_items_longer_but_not_beyond_the_next_item() -> None:
    gate = EncoderGate(cache_rows=40, budget_rows=40, lookahead_tokens=4)
    gate.take("r", 0, [A], gate.fit("r", [A], 0, 40))
    gate.close_step()
    gate.advance("r", [A], 33)
    assert gate.cache.used_rows == 20
    gate.advance("r", [A], 34)
    assert gate.cache.used_rows == 0


def test_a_request_is_taken_back_and_released() -> None:
    gate = EncoderGate(cache_rows=40, budget_rows=40)
    gate.take("r", 0, [A, B], gate.fit("r", [A, B], 0, 30))
    gate.close_step()
    gate.take("r", 0, [A, B], gate.fit("r", [A, B], 30, 30))
    gate.undo("r")
    assert gate.cache.used_rows == 20
    assert gate.close_step().encodes == []
    gate.take("r", 0, [A, B], gate.fit("r", [A, B], 30, 30))
    gate.release("r")
    work = gate.close_step()
    assert work.encodes == []
    assert gate.cache.used_rows == 0
    assert gate.cache.identifiers == ["a"]


def test_an_item_of_a_victim_is_brought_by_the_other_request() -> None:
    gate = EncoderGate(cache_rows=40, budget_rows=40)
    gate.take("r", 0, [A], gate.fit("r", [A], 0, 30))
    other = [B, MediaSpan("a", 70, 20, 20)]
    gate.take("s", 1, other, gate.fit("s", other, 60, 40))
    gate.release("r")
    assert gate.close_step().encodes == [EncodeItem(1, "s", 1, "a")]


def test_a_failed_request_leaves_no_output_for_others() -> None:
    gate = EncoderGate(cache_rows=40, budget_rows=40)
    gate.take("r", 0, [A], gate.fit("r", [A], 0, 40))
    gate.close_step()
    gate.distrust("r", [A])
    gate.release("r")
    gate.take("s", 1, [A], gate.fit("s", [A], 0, 40))
    assert gate.close_step().encodes == [EncodeItem(1, "s", 0, "a")]


# A step in which nothing runs must be followed by one in which something does. Public engines looped for ever here.


@pytest.mark.parametrize("lookahead", [0, 8])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize(
    ("cache_rows", "budget_rows"),
    [(0, 20), (5, 20), (20, 20), (39, 20), (20, 39), (40, 40)],
)
def test_items_of_any_size_finish_with_any_chunk(cache_rows: int, budget_rows: int, chunk: int, lookahead: int) -> None:
    media = [A, MediaSpan("b", 30, 20, 20), MediaSpan("a", 52, 20, 20), MediaSpan("c", 90, 10, 3)]
    gate = EncoderGate(cache_rows=cache_rows, budget_rows=budget_rows, lookahead_tokens=lookahead)
    gate.check(media, 110)
    ends = _prefill(gate, media, 110, chunk)
    assert ends[-1] == 110


def test_two_items_on_a_hybrid_finish_although_cuts_meet_boundaries() -> None:
    # Chunks stop at every multiple of 64 as well; the encoder's cut lies between two boundaries and is not rounded.
    media = [MediaSpan("a", 10, 90, 90), MediaSpan("b", 100, 90, 90)]
    gate = EncoderGate(cache_rows=100, budget_rows=100)
    start, ends = 0, []
    while start < 200 and len(ends) < 50:
        tokens = min(200, (start // 64 + 1) * 64) - start
        fit = gate.fit("r", media, start, tokens)
        if fit.tokens:
            gate.take("r", 0, media, fit)
        start += fit.tokens
        ends.append(start)
        gate.close_step()
        gate.advance("r", media, start)
    assert ends == [64, 100, 128, 192, 200]


def test_an_item_larger_than_the_cache_is_encoded_and_dropped() -> None:
    big = [MediaSpan("big", 0, 30, 30)]
    gate = EncoderGate(cache_rows=10, budget_rows=30)
    gate.take("r", 0, big, gate.fit("r", big, 0, 30))
    assert [item.identifier for item in gate.close_step().encodes] == ["big"]
    assert gate.close_step().frees == ["big"]
    assert gate.cache.resident_rows == 0


def test_an_item_larger_than_a_step_is_refused_with_the_numbers() -> None:
    gate = EncoderGate(cache_rows=100, budget_rows=19)
    with pytest.raises(MediaTooLargeError, match="20 encoder rows and a step encodes at most 19") as caught:
        gate.check([A], 100)
    assert caught.value.http_status == 400
    assert caught.value.param == "media"


@pytest.mark.parametrize(
    "media",
    [
        [B, A],
        [A, MediaSpan("b", 29, 5, 5)],
        [MediaSpan("a", 90, 20, 5)],
        [MediaSpan("a", -1, 5, 5)],
        [MediaSpan("a", 0, -1, 5)],
        [MediaSpan("a", 0, 5, 0)],
    ],
)
def test_spans_that_do_not_belong_to_the_prompt_are_refused(media: list[MediaSpan]) -> None:
    with pytest.raises(RequestError, match="must be in order"):
        EncoderGate(cache_rows=100, budget_rows=100).check(media, 100)


def test_requests_that_compete_for_a_small_cache_all_finish() -> None:
    gate = EncoderGate(cache_rows=25, budget_rows=25)
    media = {f"r{n}": [MediaSpan(f"a{n}", n, 20, 20), MediaSpan(f"b{n}", n + 20, 10, 10)] for n in range(5)}
    done = dict.fromkeys(media, 0)
    for _ in range(60):
        for slot, (name, spans) in enumerate(media.items()):
            if done[name] < 40 and (fit := gate.fit(name, spans, done[name], min(8, 40 - done[name]))).tokens:
                gate.take(name, slot, spans, fit)
                done[name] += fit.tokens
        gate.close_step()
        for name, spans in media.items():
            gate.advance(name, spans, done[name])
    assert set(done.values()) == {40}


def test_an_item_without_positions_is_needed_by_the_first_row_of_a_stay_alone() -> None:
    audio = [MediaSpan("audio", 0, 0, 30)]
    gate = EncoderGate(cache_rows=30, budget_rows=30)
    gate.check(audio, 4)
    assert gate.fit("r", audio, 2, 2) == EncoderFit(2, (0,))
    gate.take("r", 0, audio, gate.fit("r", audio, 2, 2))
    gate.undo("r")
    gate.take("r", 0, audio, gate.fit("r", audio, 2, 2))
    assert [item.identifier for item in gate.close_step().encodes] == ["audio"]
    assert gate.fit("r", audio, 4, 1) == EncoderFit(1)
    gate.advance("r", audio, 4)
    assert gate.cache.used_rows == 0
    assert gate.fit("r", audio, 4, 1) == EncoderFit(1)
    # After a preemption its blocks are gone, so a new stay begins with it again.
    gate.release("r")
    assert gate.fit("r", audio, 0, 5) == EncoderFit(5, (0,))


def test_taking_back_a_later_row_does_not_bring_the_item_again() -> None:
    audio = [MediaSpan("audio", 0, 0, 30)]
    gate = EncoderGate(cache_rows=30, budget_rows=30)
    gate.take("r", 0, audio, gate.fit("r", audio, 0, 4))
    gate.close_step()
    gate.advance("r", audio, 4)
    gate.take("r", 0, audio, gate.fit("r", audio, 4, 1))
    gate.undo("r")
    assert gate.fit("r", audio, 4, 1) == EncoderFit(1)


def test_an_item_may_end_with_the_prompt_and_have_a_single_row() -> None:
    EncoderGate(cache_rows=1, budget_rows=1).check([MediaSpan("a", 0, 3, 1), MediaSpan("b", 3, 7, 1)], 10)


def test_an_item_without_positions_that_does_not_fit_holds_the_row_back() -> None:
    gate = EncoderGate(cache_rows=30, budget_rows=30)
    gate.take("s", 1, [A], gate.fit("s", [A], 0, 40))
    audio = [MediaSpan("audio", 0, 0, 30)]
    assert gate.fit("r", audio, 0, 4) == EncoderFit(0)
    gate.close_step()
    gate.advance("s", [A], 40)
    assert gate.fit("r", audio, 0, 4) == EncoderFit(4, (0,))

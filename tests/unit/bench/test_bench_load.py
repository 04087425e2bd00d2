"""Arrivals, lengths, prompts, and driving them."""

import asyncio
import random
from itertools import pairwise

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.load import Answer, drive, lengths, make_load, poisson_arrivals_s, text_prompt


def test_poisson_arrivals_are_a_function_of_the_seed():
    assert poisson_arrivals_s(50, 3.0, 1) == poisson_arrivals_s(50, 3.0, 1)
    assert poisson_arrivals_s(50, 3.0, 1) != poisson_arrivals_s(50, 3.0, 2)
    assert poisson_arrivals_s(50, 3.0, 1)[:10] == poisson_arrivals_s(10, 3.0, 1)


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    rate = 8.0
    times = poisson_arrivals_s(20001, rate, 0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert mean == pytest.approx(1 / rate, rel=0.03)
    assert variance**0.5 == pytest.approx(1 / rate, rel=0.05)
    assert sum(gap > 1 / rate for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)  # 1/e


def test_without_a_rate_all_arrive_at_once():
    assert poisson_arrivals_s(3, None, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigError, match="--request-rate"):
        poisson_arrivals_s(3, rate, 0)


def test_lengths():
    assert lengths("fixed", 2, 5, 6, 0) == [(5, 6), (5, 6)]
    mixed = lengths("mixed", 4000, 5, 6, 0)
    assert mixed == lengths("mixed", 4000, 1, 1, 0)
    assert mixed != lengths("mixed", 4000, 5, 6, 1)
    assert all(8 <= inputs <= 4096 and 8 <= outputs <= 1024 for inputs, outputs in mixed)
    assert 330 < sum(inputs for inputs, _ in mixed) / 4000 < 390
    assert 185 < sum(outputs for _, outputs in mixed) / 4000 < 215


def test_prompts_have_their_lengths_and_do_not_repeat():
    load = make_load([(16, 4)] * 20, [0.0] * 20, kind="ids", token_ids=(100, 30000), seed=0)
    assert all(len(request.prompt) == 16 and all(100 <= token < 30000 for token in request.prompt) for request in load)
    assert len({tuple(request.prompt[:4]) for request in load}) == 20
    assert load == make_load([(16, 4)] * 20, [0.0] * 20, kind="ids", token_ids=(100, 30000), seed=0)
    texts = make_load([(16, 4)] * 3, [0.0] * 3, kind="text", token_ids=(0, 1), seed=0)
    assert all(len(request.prompt.split()) == 16 for request in texts)
    assert text_prompt(5, random.Random(1)) == text_prompt(5, random.Random(1))


async def test_no_more_than_max_concurrency_are_in_flight_and_answers_keep_their_order():
    running, most, seen = 0, 0, []

    async def send(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(1 + (7 * request.index) % 5):
            await asyncio.sleep(0)
        running -= 1
        return Answer(request.index)

    load = make_load([(1, 1)] * 30, [0.0] * 30, kind="ids", token_ids=(0, 9), seed=0)
    answers = await drive(load, send, 4, lambda answer: seen.append(answer.index))
    assert most == 4
    assert [answer.index for answer in answers] == list(range(30))
    assert sorted(seen) == list(range(30))


async def test_requests_are_not_sent_before_they_arrive():
    loop, sent = asyncio.get_running_loop(), []

    async def send(request):
        sent.append(loop.time())
        return Answer(request.index)

    start = loop.time()
    load = make_load([(1, 1)] * 3, [0.0, 0.02, 0.05], kind="ids", token_ids=(0, 9), seed=0)
    await drive(load, send, None)
    # The loop's clock may be a little coarser than the one that is waited by.
    assert all(at - start >= request.arrival_s - 0.002 for at, request in zip(sent, load, strict=True))

"""The sampler against a slow reference, feature by feature and all together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import adjusted, choices, distribution, slot_start, uniform

from headrace.types.sampling import SamplingParams
from headrace.worker.sampling import sampler as sampler_module
from headrace.worker.sampling.sampler import Sampler

VOCAB = 40


class FixedHistory:
    def __init__(self, outputs):
        self.outputs = outputs

    def output_ids(self, slot):
        return np.array(self.outputs[slot], np.int64)


def run(rows, vocab=VOCAB, slots=None):
    """Sample one batch of (logits, params, prompt, output, eos, bad_words)."""
    slots = list(range(len(rows))) if slots is None else slots
    sampler = Sampler(max(slots) + 1, vocab)
    outputs = {}
    for slot, (_, params, prompt, output, eos, bad_words) in zip(slots, rows, strict=True):
        assert sampler.start(slot_start(slot, params, prompt, output, eos, bad_words)) is None
        outputs[slot] = output
    logits = torch.tensor(np.stack([row[0] for row in rows]), dtype=torch.float32)
    positions = np.array([len(row[3]) for row in rows], np.int64)
    return sampler.sample(logits, np.array(slots, np.int64), positions, FixedHistory(outputs))


def plain(logits, params, output=()):
    return logits, params, [1, 2, 3], list(output), [0], []


tokens = st.integers(0, VOCAB - 1)
# A coarse grid, so that ties are common.
grids = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB).map(np.array)


@st.composite
def any_row(draw):
    allowed = draw(st.none() | st.lists(tokens, min_size=6, max_size=VOCAB, unique=True))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([-1, 0, 1, 3, 10, 39, 40, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=draw(st.none() | st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=4)),
        allowed_token_ids=allowed,
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_token_ids=draw(st.lists(tokens, max_size=2)),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=100,
    )
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    output = draw(st.lists(tokens, max_size=6))
    bad_words = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=2))
    return draw(grids), params, prompt, output, draw(st.lists(tokens, max_size=1)), bad_words


@given(rows=st.lists(any_row(), min_size=1, max_size=5))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_any_batch_equals_the_reference_row_by_row(rows):
    sampled = run(rows)
    for index, (logits, params, prompt, output, eos, bad_words) in enumerate(rows):
        row = adjusted(logits, params, prompt, output, eos, bad_words)
        if np.isneginf(row.max()):
            assert sampled.errors[index] == sampler_module.NOTHING_LEFT
            continue
        assert index not in sampled.errors
        assert sampled.token_ids[index] in choices(row, params, len(output))


@given(rows=st.lists(any_row(), min_size=2, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_row_does_not_depend_on_its_neighbours_or_its_slot(rows, data):
    together = run(rows)
    slots = data.draw(st.permutations(range(8)))[: len(rows)]
    shuffled = run(rows, slots=slots)
    np.testing.assert_array_equal(together.token_ids, shuffled.token_ids)
    for index, row in enumerate(rows):
        assert run([row]).token_ids[0] == together.token_ids[index]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 300, "top_p": 0.95},
        {"top_k": 5000},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.001, "temperature": 2.0},
    ],
)
def test_a_wide_vocabulary_takes_the_quick_and_the_full_path_alike(changes):
    """Large enough that candidates are a part of the vocabulary; some of the settings need all of it."""
    vocab, count = 10007, 24
    generator = np.random.default_rng(5)
    # Rounded, so that the filters' edges have ties.
    logits = np.round(generator.normal(0, 3, (count, vocab)), 1).astype(np.float32)
    params = [SamplingParams(seed=seed, **changes) for seed in range(count)]
    rows = [plain(logits[index], params[index], output=[4] * index) for index in range(count)]
    sampled = run(rows, vocab)
    for index in range(count):
        assert sampled.token_ids[index] in choices(logits[index], params[index], index)
        assert run([rows[index]], vocab).token_ids[0] == sampled.token_ids[index]


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.7}]
)
def test_draws_follow_the_exact_probabilities(changes):
    """Chi-square with a bound far beyond the 99.99 % point; and never a token of probability 0."""
    draws = 20000
    logits = np.random.default_rng(11).normal(0, 1.5, VOCAB).astype(np.float32)
    params = SamplingParams(seed=123456789, **changes)
    sampler = Sampler(1, VOCAB)
    sampler.start(slot_start(0, params))
    batch = torch.tensor(logits).repeat(draws, 1)
    picked = sampler.sample(batch, np.zeros(draws, np.int64), np.arange(draws), FixedHistory({0: []})).token_ids
    counts = np.bincount(picked, minlength=VOCAB)
    expected = distribution(logits, params) * draws
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def test_two_seeds_and_two_positions_are_unrelated():
    logits = np.zeros(VOCAB)
    first = [run([plain(logits, SamplingParams(seed=1), [0] * p)]).token_ids[0] for p in range(40)]
    second = [run([plain(logits, SamplingParams(seed=2), [0] * p)]).token_ids[0] for p in range(40)]
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 8
    assert len(set(first)) > 15


def test_uniform_matches_the_reference_for_extreme_seeds():
    from headrace.worker.sampling.randomness import fold_seed, uniforms

    seeds = [0, 1, 2**63, 2**64 - 1, -1, -(2**63)]
    positions = np.array([0, 1, 7, 2**31, 2**40, 3], np.int64)
    got = uniforms(np.array([fold_seed(seed) for seed in seeds], np.uint64), positions)
    want = [uniform(seed & (2**64 - 1), int(position)) for seed, position in zip(seeds, positions, strict=True)]
    assert got.tolist() == want
    assert fold_seed(2**64 + 5) != fold_seed(5)


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_the_ends_of_the_unit_interval_never_pick_a_forbidden_token(changes, monkeypatch):
    logits = np.full(VOCAB, -np.inf)
    logits[[7, 20]] = 0.0
    params = SamplingParams(allowed_token_ids=[7, 20], seed=0, **changes)
    for point, want in ((0.0, 7), (1.0 - 2.0**-53, 20)):
        monkeypatch.setattr(sampler_module, "uniforms", lambda seeds, _, point=point: np.full(len(seeds), point))
        assert run([plain(np.zeros(VOCAB), params)]).token_ids.tolist() == [want]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_poisoned_row_fails_alone(poison):
    healthy = np.random.default_rng(0).normal(size=VOCAB)
    bad = healthy.copy()
    bad[VOCAB - 1] = poison
    for params in (SamplingParams(temperature=0.0, logprobs=2), SamplingParams(seed=4, top_p=0.9, logprobs=2)):
        alone = run([plain(healthy, params)])
        sampled = run([plain(healthy, params), plain(bad, params), plain(healthy, params)])
        assert sampled.errors == {1: sampler_module.NON_FINITE}
        assert sampled.token_ids[[0, 2]].tolist() == [alone.token_ids[0]] * 2
        assert sorted(sampled.logprobs) == [0, 2]


def test_a_sum_that_overflows_is_not_an_error():
    logits = np.full(VOCAB, 3.0e38)
    logits[5] = 3.2e38
    sampled = run([plain(logits, SamplingParams(temperature=0.0))])
    assert (sampled.errors, sampled.token_ids.tolist()) == ({}, [5])


def test_parameters_that_forbid_everything_fail_the_row():
    params = SamplingParams(allowed_token_ids=[0], min_tokens=4, seed=1)
    sampled = run([plain(np.zeros(VOCAB), params), plain(np.arange(VOCAB), SamplingParams(temperature=0.0))])
    assert sampled.errors == {0: sampler_module.NOTHING_LEFT}
    assert sampled.token_ids[1] == VOCAB - 1


def test_a_penalty_that_overflows_fails_the_row_only():
    params = SamplingParams(repetition_penalty=1e-60, temperature=0.0)
    sampled = run([plain(np.ones(VOCAB), params), plain(np.arange(VOCAB), SamplingParams(temperature=0.0))])
    assert list(sampled.errors) == [0]
    assert sampled.token_ids[1] == VOCAB - 1


@pytest.mark.parametrize(
    ("changes", "bad_words", "name"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, [], "logit_bias"),
        ({"allowed_token_ids": [1, VOCAB]}, [], "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB + 9]}, [], "stop_token_ids"),
        ({}, [[1, VOCAB]], "bad_words"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_named(changes, bad_words, name):
    sampler = Sampler(2, VOCAB)
    problem = sampler.start(slot_start(1, SamplingParams(seed=1, **changes), bad_words=bad_words))
    assert problem is not None
    assert name in problem
    assert str(VOCAB) in problem
    assert sampler.table.features[1] == 0


def test_a_random_request_without_a_seed_is_refused_but_a_greedy_one_is_not():
    sampler = Sampler(1, VOCAB)
    assert "seed" in (sampler.start(slot_start(0, SamplingParams())) or "")
    assert sampler.start(slot_start(0, SamplingParams(temperature=0.0))) is None


def test_penalties_count_incrementally_as_a_restart_would():
    """Twenty steps in one life equal a fresh start from the same tokens at each step (preemption, resubmission)."""
    generator = np.random.default_rng(3)
    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3, seed=9, top_p=0.95
    )
    lasting, output = Sampler(1, VOCAB), []
    lasting.start(slot_start(0, params))
    for position in range(20):
        # Few likely tokens, so that they come again and their counts matter.
        logits = generator.normal(0, 1, VOCAB) + 4.0 * (np.arange(VOCAB) < 5)
        batch = torch.tensor(logits[None], dtype=torch.float32)
        one = np.array([0], np.int64)
        got = lasting.sample(batch, one, np.array([position]), FixedHistory({0: output})).token_ids[0]
        assert got == run([(logits, params, [1, 2, 3], output, [0], [])]).token_ids[0]
        output.append(int(got))
    assert len(set(output)) < 20


def test_a_released_slot_leaves_nothing_behind():
    sampler = Sampler(1, VOCAB)
    sampler.start(slot_start(0, SamplingParams(allowed_token_ids=[4], logprobs=3, presence_penalty=2.0, seed=1)))
    sampler.release(0)
    sampler.start(slot_start(0, SamplingParams(temperature=0.0)))
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    sampled = sampler.sample(logits, np.array([0]), np.array([0]), FixedHistory({0: []}))
    assert (sampled.token_ids.tolist(), sampled.logprobs) == ([VOCAB - 1], {})


def test_greedy_rows_touch_nothing_but_an_argmax(monkeypatch):
    """Features cost nothing when no row uses them: every other part is made to raise."""

    def unexpected(*args, **kwargs):
        raise AssertionError("called for greedy rows")

    names = "draw_filtered draw_plain position_logprobs apply_bias apply_penalties forbid keep_allowed uniforms"
    for name in names.split():
        monkeypatch.setattr(sampler_module, name, unexpected)
    rows = [plain(np.random.default_rng(n).normal(size=VOCAB), SamplingParams(temperature=0.0)) for n in range(4)]
    assert run(rows).token_ids.tolist() == [int(np.argmax(row[0])) for row in rows]

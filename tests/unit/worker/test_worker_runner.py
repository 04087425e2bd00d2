"""Plans on a fake model that hashes its context: inputs, chunks, resumption, failures, prompt log-probabilities."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from fake_model import VOCAB, FakeModel, context_hash, logits_of
from sampling_reference import choices, slot_start

from headrace.base.errors import InvariantError
from headrace.base.ids import BlockId, RequestId, Slot, StepId
from headrace.types.plans import BlockAppend, BlockCopy, EncodeItem, LoadJob, PlanRow, StepPlan
from headrace.types.sampling import SamplingParams
from headrace.worker.runner import StepRunner
from headrace.worker.sampling import logprobs as logprobs_module

GREEDY = SamplingParams(temperature=0.0)


class Bench:
    def __init__(self, with_logprobs=True):
        self.model = FakeModel()
        self.runner = StepRunner(
            self.model,
            self.model,
            slots=8,
            vocab_tokens=VOCAB,
            device=torch.device("cpu"),
            with_logprobs=with_logprobs,
        )
        self.step = 0

    def run(self, rows=(), starts=(), releases=(), appends=()):
        return self.execute(rows, starts, releases, appends).rows

    def decode(self, *slots, appends=()):
        """Return tokens and errors of a step in which slots decode and nothing else happens."""
        result = self.execute(appends=appends, decodes=slots)
        return result.decode_tokens, dict(result.decode_errors)

    def execute(self, rows=(), starts=(), releases=(), appends=(), decodes=()):
        self.step += 1
        plan_rows = [
            PlanRow(Slot(slot), RequestId(f"request-{slot}"), start, tokens, sample)
            for slot, start, tokens, sample in rows
        ]
        plan = StepPlan(StepId(self.step), list(releases), list(starts), list(appends), plan_rows, list(decodes))
        result = self.runner.execute(plan)
        assert result.step == self.step
        assert len(result.rows) == len(plan_rows)
        assert len(result.decode_tokens) == len(decodes)
        return result


def greedy_continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(context_hash(tokens)).argmax()))
    return tokens[len(prompt) :]


def test_greedy_decoding_with_growing_tables_follows_the_context():
    bench, prompt = Bench(), [5, 6, 7]
    rows = bench.run([(2, 0, 3, True)], [slot_start(2, GREEDY, prompt, blocks=[[9]])])
    output = rows[0].token_ids
    for position in range(3, 12):
        appends = [BlockAppend(Slot(2), [[20 + position]])] if position % 4 == 0 else []
        output += bench.run([(2, position, 1, True)], appends=appends)[0].token_ids
    assert output == greedy_continuation(prompt, 10)


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1, 1, 9], [10, 1], [3, 3, 3, 2]])
def test_chunks_of_a_prompt_change_nothing_and_only_the_last_samples(chunks):
    bench, prompt = Bench(), list(range(20, 31))
    starts, done = [slot_start(0, GREEDY, prompt, blocks=[[1, 2, 3]])], 0
    for index, tokens in enumerate(chunks):
        last = index == len(chunks) - 1
        row = bench.run([(0, done, tokens, last)], starts if index == 0 else [])[0]
        assert bench.model.logit_rows == ([1] if last else [])
        assert row.token_ids == (greedy_continuation(prompt, 1) if last else [])
        done += tokens


def test_mixed_rows_answer_as_each_would_alone():
    """A decode, a chunk that goes on, a chunk that ends, and a random row, in one step."""
    bench = Bench()
    random = SamplingParams(seed=77, top_p=0.9, logprobs=2)
    prompts = {0: [1, 2, 3], 1: list(range(10)), 2: [8, 9], 3: [4] * 5}
    params = {0: GREEDY, 1: GREEDY, 2: GREEDY, 3: random}
    starts = [
        slot_start(slot, params[slot], prompt, blocks=[list(range(1 + 4 * slot, 5 + 4 * slot))])
        for slot, prompt in prompts.items()
    ]
    first = bench.run([(0, 0, 3, True)], starts)[0].token_ids[0]
    rows = bench.run([(2, 0, 2, True), (0, 3, 1, True), (1, 0, 6, False), (3, 0, 5, True)])
    assert rows[0].token_ids == greedy_continuation(prompts[2], 1)
    assert [first, *rows[1].token_ids] == greedy_continuation(prompts[0], 2)
    assert rows[2].token_ids == []
    assert rows[3].token_ids[0] in choices(logits_of(context_hash(prompts[3])), random, 0)
    assert rows[3].logprobs is not None
    assert rows[3].logprobs[0].token_id == rows[3].token_ids[0]
    assert [row.logprobs for row in rows[:3]] == [None] * 3
    assert bench.model.logit_rows == [1, 3]


def test_resumption_after_preemption_goes_on_where_it_was():
    """The same request, moved to another slot with its tokens so far, samples the same continuation."""
    params = SamplingParams(seed=5, temperature=1.5, presence_penalty=1.0, frequency_penalty=0.5)
    prompt = [3, 1, 4, 1, 5]

    def decode(bench, slot, output, count):
        for _ in range(count):
            position = len(prompt) + len(output) - 1
            output += bench.run([(slot, position, 1, True)])[0].token_ids

    whole, bench = [], Bench()
    whole += bench.run([(1, 0, 5, True)], [slot_start(1, params, prompt, blocks=[[1, 2, 3, 4]])])[0].token_ids
    decode(bench, 1, whole, 8)

    parts, bench = [], Bench()
    parts += bench.run([(1, 0, 5, True)], [slot_start(1, params, prompt, blocks=[[1, 2, 3, 4]])])[0].token_ids
    decode(bench, 1, parts, 3)
    resumed = slot_start(6, params, prompt, parts, blocks=[[7, 8, 9, 10]])
    parts += bench.run([(6, 0, 9, True)], [resumed], releases=[Slot(1)])[0].token_ids
    decode(bench, 6, parts, 4)
    assert parts == whole


@pytest.mark.parametrize("chunks", [[9], [1, 8], [4, 5], [2, 3, 4]])
@pytest.mark.parametrize("width", [256, 3])
def test_prompt_logprobs_equal_log_softmax_across_chunks_and_slices(chunks, width, monkeypatch):
    monkeypatch.setattr(logprobs_module, "MAX_SLICE_POSITIONS", width)
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    bench, entries, done = Bench(), [], 0
    for index, tokens in enumerate(chunks):
        starts = [slot_start(0, params, prompt, blocks=[[1, 2, 3]])] if index == 0 else []
        row = bench.run([(0, done, tokens, index == len(chunks) - 1)], starts)[0]
        assert row.prompt_logprobs is not None
        entries += row.prompt_logprobs
        done += tokens
    assert max(bench.model.logit_rows) <= width
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        raw = torch.from_numpy(logits_of(context_hash(prompt[: position + 1]))).double()
        exact = raw.log_softmax(0)
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-6)
        assert entry.top_ids == torch.argsort(raw, descending=True)[:2].tolist()
        assert entry.rank == int((raw > raw[entry.token_id]).sum()) + 1
    after = bench.run([(0, 9, 1, True)])[0]
    assert after.prompt_logprobs == []


def test_poisoned_logits_fail_their_row_only_and_for_good():
    bench = Bench()
    starts = [slot_start(slot, GREEDY, [slot, slot], blocks=[[1 + slot]]) for slot in range(3)]
    bench.model.poisoned = {context_hash([1, 1])}
    rows = bench.run([(slot, 0, 2, True) for slot in range(3)], starts)
    assert [row.token_ids for row in rows] == [greedy_continuation([0, 0], 1), [], greedy_continuation([2, 2], 1)]
    assert "NaN" in (rows[1].error or "")
    # A plan that was made before the failure was known may still have a row for it.
    rows = bench.run([(slot, 2, 1, True) for slot in range(3)])
    assert [row.error is None for row in rows] == [True, False, True]
    bench.run(releases=[Slot(1)])
    fresh = bench.run([(1, 0, 1, True)], [slot_start(1, GREEDY, [9], blocks=[[5]])])[0]
    assert fresh.token_ids == greedy_continuation([9], 1)


def test_decodes_answer_as_the_same_rows_would():
    """Greedy and random slots; more steps than the state keeps of recent tokens; one slot decodes only now and then."""
    params = [GREEDY, SamplingParams(seed=9, top_p=0.9, presence_penalty=0.5), SamplingParams(seed=1, temperature=2.0)]
    answers = []
    for columnar in (True, False):
        bench, outputs = Bench(), [[], [], []]
        bench.model.memory = np.full((200, 4), -1, np.int64)
        starts = [slot_start(slot, params[slot], [slot + 1, 7], blocks=[[1 + slot]]) for slot in range(3)]
        for slot, row in enumerate(bench.run([(slot, 0, 2, True) for slot in range(3)], starts)):
            outputs[slot] += row.token_ids
        for step in range(150):
            slots = [2, 0, 1] if step % 5 else [0, 1]
            ends = {slot: 1 + len(outputs[slot]) for slot in slots}
            appends = [
                BlockAppend(Slot(slot), [[1 + slot + 3 * (end // 4)]]) for slot, end in ends.items() if end % 4 == 0
            ]
            if columnar:
                tokens, errors = bench.decode(*slots, appends=appends)
                assert errors == {}
            else:
                rows = bench.run([(slot, end, 1, True) for slot, end in ends.items()], appends=appends)
                tokens = [row.token_ids[0] for row in rows]
            for slot, token in zip(slots, tokens, strict=True):
                outputs[slot].append(token)
        answers.append(outputs)
    assert answers[0] == answers[1]
    assert answers[0][0] == greedy_continuation([1, 7], 151)


def test_decodes_go_before_rows_and_a_failed_one_is_named():
    bench = Bench()
    starts = [slot_start(slot, GREEDY, [slot, slot], blocks=[[1 + slot]]) for slot in range(3)]
    first = bench.run([(slot, 0, 2, True) for slot in range(3)], starts)
    bench.model.poisoned = {context_hash([1, 1, *first[1].token_ids])}
    late = slot_start(5, GREEDY, [9, 8, 7], blocks=[[6]])
    result = bench.execute([(5, 0, 2, False), (0, 2, 1, True)], [late], decodes=[2, 1])
    assert result.decode_tokens[0] == greedy_continuation([2, 2], 2)[1]
    assert [index for index, _ in result.decode_errors] == [1]
    assert "NaN" in result.decode_errors[0][1]
    assert [row.token_ids for row in result.rows] == [[], greedy_continuation([0, 0], 2)[1:]]
    assert bench.model.logit_rows[-1] == 3
    # A plan that was made before the failure was known may still have a decode of it.
    assert list(bench.decode(1, 2)[1]) == [0]


@pytest.mark.parametrize("decodes", [[3], [0, 0], [0]])
def test_decodes_that_do_not_fit_raise(decodes):
    bench = Bench()
    bench.run([(0, 0, 2, True)], [slot_start(0, GREEDY, [1, 2], blocks=[[1, 2]])])
    with pytest.raises(InvariantError):
        bench.execute([(0, 2, 1, True)] if decodes == [0] else [], decodes=decodes)


def test_poisoned_prompt_positions_fail_the_row():
    bench, params = Bench(), SamplingParams(temperature=0.0, prompt_logprobs=0)
    bench.model.poisoned = {context_hash([6, 7])}
    row = bench.run([(0, 0, 3, True)], [slot_start(0, params, [6, 7, 8], blocks=[[1]])])[0]
    assert "NaN" in (row.error or "")
    assert row.token_ids == []


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (slot_start(0, GREEDY, [1, VOCAB, 2], blocks=[[1]]), f"token id {VOCAB}"),
        (slot_start(0, GREEDY, [1, -3, 2], blocks=[[1]]), "token id -3"),
        (slot_start(0, SamplingParams(seed=1, logit_bias={99: 1.0}), blocks=[[1]]), "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary_fail_the_row_by_name(start, name):
    bench = Bench()
    rows = bench.run([(0, 0, 3, True), (1, 0, 1, True)], [start, slot_start(1, GREEDY, [4], blocks=[[2]])])
    assert name in (rows[0].error or "")
    assert rows[1].token_ids == greedy_continuation([4], 1)


def test_ranks_that_nobody_reads_sample_alike_without_logprobs():
    params = SamplingParams(seed=3, logprobs=2, prompt_logprobs=1)
    answers = []
    for with_logprobs in (True, False):
        bench = Bench(with_logprobs)
        row = bench.run([(0, 0, 3, True)], [slot_start(0, params, [1, 2, 3], blocks=[[1]])])[0]
        answers.append((row.token_ids, bench.model.logit_rows))
        assert (row.logprobs is not None) == with_logprobs
    assert answers[0] == answers[1]


def test_an_empty_plan_and_a_release_only_plan():
    bench = Bench()
    assert bench.run() == []
    bench.run([(0, 0, 2, True)], [slot_start(0, GREEDY, [1, 2], blocks=[[1]])])
    assert bench.run(releases=[Slot(0)]) == []
    assert bench.model.logit_rows == [1]


@pytest.mark.parametrize("row", [(0, 0, 5, True), (0, 0, 2, True), (0, 2, 3, False), (3, 0, 1, True), (1, 0, 3, True)])
def test_rows_that_do_not_fit_their_slot_raise(row):
    bench = Bench()
    starts = [slot_start(0, GREEDY, [1, 2, 3, 4], blocks=[[1, 2]])]
    with pytest.raises(InvariantError):
        bench.run([row], starts)


def test_a_one_token_chunk_in_a_decode_only_step_reads_its_own_position():
    bench, prompt = Bench(), [9, 8, 7]
    starts = [slot_start(0, GREEDY, prompt, blocks=[[1]]), slot_start(1, GREEDY, [5], blocks=[[2]])]
    rows = bench.run([(0, 0, 1, False), (1, 0, 1, True)], starts)
    assert [row.token_ids for row in rows] == [[], greedy_continuation([5], 1)]
    rows = bench.run([(0, 1, 2, True)])
    assert rows[0].token_ids == greedy_continuation(prompt, 1)
    assert np.array_equal(bench.model.memory[1, :3], prompt)


def test_copies_come_before_and_saves_after_the_computation():
    bench, prompt = Bench(), [9, 8, 7, 6, 5]
    bench.run([(0, 0, 5, True)], [slot_start(0, GREEDY, prompt, blocks=[[1, 2]])])
    bench.model.done.clear()
    # Slot 1 hits five tokens: block 1 is shared, block 2 is copied into 3, and 4 keeps a copy of what 3 is after.
    start = slot_start(1, GREEDY, [*prompt, 4], blocks=[[1, 3]])
    plan = StepPlan(StepId(9), [], [start], [], [PlanRow(Slot(1), RequestId("request-1"), 5, 1, True)])
    copies, saves = [BlockCopy(0, BlockId(2), BlockId(3))], [BlockCopy(0, BlockId(3), BlockId(4))]
    result = bench.runner.execute(msgspec.structs.replace(plan, copies=copies, saves=saves))
    assert bench.model.done == [(2, 3), "forward", (3, 4), "observe"]
    assert result.rows[0].token_ids == greedy_continuation([*prompt, 4], 1)
    assert bench.model.memory[4].tolist() == [5, 4, -1, -1]
    # Also in a step that computes nothing.
    bench.model.done.clear()
    bench.runner.execute(StepPlan(StepId(10), [], [], [], [], copies=copies, saves=saves))
    assert bench.model.done == [(2, 3), (3, 4)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"encodes": [EncodeItem(Slot(0), RequestId("request-0"), 0, "x")]}, "encoder"),
        ({"encoder_frees": ["x"]}, "encoder"),
        ({"loads": [LoadJob(1, RequestId("request-0"), 0, 4, [[BlockId(1)]], [b"h"])]}, "connector"),
        ({"rows": [PlanRow(Slot(0), RequestId("request-0"), 0, 3, True, drafts=1)]}, "drafts"),
        ({"rows": [PlanRow(Slot(0), RequestId("request-0"), 0, 3, True, gated=True)]}, "grammar"),
        ({"starts": [msgspec.structs.replace(slot_start(1, GREEDY), encoder_tokens=3)]}, "media"),
    ],
)
def test_what_no_worker_does_yet_is_refused_before_anything_changes(changes, why):
    bench = Bench()
    bench.run([(0, 0, 2, False)], [slot_start(0, GREEDY, [1, 2, 3], blocks=[[1]])])
    plan = StepPlan(StepId(2), [Slot(0)], [], [], [])
    with pytest.raises(InvariantError, match=why):
        bench.runner.execute(msgspec.structs.replace(plan, **changes))
    assert bench.runner.state.request_ids[0] == "request-0"

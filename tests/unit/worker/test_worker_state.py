"""Slots: starts, releases, growth, failures, and the errors of an impossible plan."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_reference import slot_start

from headrace.base.errors import InvariantError
from headrace.base.ids import BlockId, Slot
from headrace.types.plans import BlockAppend
from headrace.types.sampling import SamplingParams
from headrace.worker.state import BatchState

GREEDY = SamplingParams(temperature=0.0)


def started(slot=0, **changes):
    state = BatchState(4)
    state.start(slot_start(slot, GREEDY, **changes))
    return state


def tables(state, slot):
    lengths = state.table_blocks[slot].tolist()
    return [table[slot, :length].tolist() for table, length in zip(state.block_tables, lengths, strict=True)]


def test_a_slot_keeps_prompt_output_and_last_token():
    state = started(prompt=[5, 6, 7], output=[8, 9])
    assert (state.lengths[0], state.prompt_lengths[0], state.last_tokens[0]) == (5, 3, 9)
    assert state.output_ids(0).tolist() == [8, 9]


def test_tokens_grow_past_the_first_capacity():
    state = started(prompt=list(range(200)))
    state.start(slot_start(2, GREEDY, prompt=[1]))
    slots = np.array([0, 2])
    for step in range(700):
        state.append_tokens(slots, np.array([step, step + 1]))
    assert state.output_ids(0).tolist() == list(range(700))
    assert state.output_ids(2).tolist() == list(range(1, 701))
    assert state.tokens(0)[:200].tolist() == list(range(200))
    assert state.last_tokens[[0, 2]].tolist() == [699, 700]


def test_block_tables_grow_per_group_and_are_copies():
    start = slot_start(1, GREEDY, blocks=[[1, 2], [7]])
    state = BatchState(4, groups=2)
    state.start(start)
    state.append_blocks(BlockAppend(Slot(1), [[BlockId(3)], []]))
    assert tables(state, 1) == [[1, 2, 3], [7]]
    assert start.blocks == [[1, 2], [7]]
    # Past the first capacity, beside another slot; behind a table's end is the null block.
    state.start(slot_start(2, GREEDY, blocks=[[4], list(range(100, 400))]))
    assert tables(state, 2) == [[4], list(range(100, 400))]
    assert tables(state, 1) == [[1, 2, 3], [7]]
    assert not state.block_tables[1][1, 1:].any()
    state.release(2)
    state.start(slot_start(2, GREEDY, blocks=[[], [9]]))
    assert tables(state, 2) == [[], [9]]
    assert not state.block_tables[0][2].any()
    assert not state.block_tables[1][2, 1:].any()


def test_release_then_reuse():
    state = started(prompt=[1, 2, 3])
    state.fail(0, "why", 10)
    state.release(0)
    assert (state.lengths[0], state.failures[0], tables(state, 0)) == (0, None, [[]])
    state.start(slot_start(0, GREEDY, prompt=[4]))
    assert state.tokens(0)[:1].tolist() == [4]


def test_a_failed_slot_has_only_tokens_that_can_be_embedded():
    state = started(prompt=[3, 99, -1, 100])
    state.fail(0, "token id 99 is outside", 50)
    assert state.tokens(0)[:4].tolist() == [3, 0, 0, 0]
    assert state.last_tokens[0] == 0


@pytest.mark.parametrize(
    "act",
    [
        lambda state: state.start(slot_start(0, GREEDY)),
        lambda state: state.start(slot_start(1, GREEDY, prompt=())),
        lambda state: state.release(1),
        lambda state: state.tokens(1),
        lambda state: state.append_blocks(BlockAppend(Slot(1), [[]])),
        lambda state: state.append_blocks(BlockAppend(Slot(0), [[], []])),
    ],
)
def test_impossible_plans_raise(act):
    with pytest.raises(InvariantError):
        act(started())

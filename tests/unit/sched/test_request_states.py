"""The transition table, and what each state owns."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvariantError
from headrace.base.ids import RequestId
from headrace.kv.prefix_hash import NO_EXTRAS
from headrace.kv.sequence import SequenceKv
from headrace.sched.request import NEXT_STATES, PARKED, QUEUED, REMOTE, Request, RequestState
from headrace.types.requests import EngineRequest, MediaSpan
from headrace.types.sampling import SamplingParams


def make_request(**fields: object) -> Request:
    sampling = SamplingParams(seed=0, logprobs=fields.pop("logprobs", None))  # type: ignore[arg-type]
    source = EngineRequest(request_id=RequestId("r"), prompt_token_ids=[1, 2], sampling=sampling, **fields)
    kv = SequenceKv(1, extras=NO_EXTRAS, prompt_tokens=2)
    return Request(source, order_key=(0.0, 0), limit_tokens=9, kv=kv)


def test_the_table_has_every_state_and_only_the_end_has_no_way_on() -> None:
    assert set(NEXT_STATES) == set(RequestState)
    assert [state for state, after in NEXT_STATES.items() if not after] == [RequestState.FINISHED]
    assert all(RequestState.FINISHED in after for state, after in NEXT_STATES.items() if after)


def test_every_state_can_be_reached_and_each_is_of_one_kind() -> None:
    reached, todo = set(), [RequestState.WAITING]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo += NEXT_STATES[state]
    assert reached == set(RequestState)
    assert QUEUED | PARKED | REMOTE | {RequestState.RUNNING, RequestState.FINISHED} == set(RequestState)
    assert len(QUEUED) + len(PARKED) + len(REMOTE) + 2 == len(RequestState)


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("after", RequestState)
def test_only_transitions_of_the_table_are_possible(state: RequestState, after: RequestState) -> None:
    request = make_request()
    request.state = state
    if after in NEXT_STATES[state]:
        request.move_to(after)
        assert request.state is after
    else:
        with pytest.raises(InvariantError, match=f"{state.name} -> {after.name}"):
            request.move_to(after)


@pytest.mark.parametrize("parked", sorted(PARKED, key=lambda state: state.name))
def test_parked_requests_never_run_without_passing_the_queue(parked: RequestState) -> None:
    assert RequestState.RUNNING not in NEXT_STATES[parked]
    assert RequestState.WAITING in NEXT_STATES[parked]


def test_who_is_plain() -> None:
    assert make_request().plain
    assert not make_request(logprobs=1).plain
    assert not make_request(grammar="g").plain_decodes
    with_media = make_request(media=[MediaSpan("x", 0, 1, 1)])
    assert (with_media.plain, with_media.plain_decodes) == (False, True)
    with_media.plain, with_media.planned_tokens = True, 2
    with_media.restart()
    assert (with_media.plain, with_media.planned_tokens) == (False, 0), "a restart needs the outputs again"

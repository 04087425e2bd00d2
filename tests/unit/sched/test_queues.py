import pytest

from headrace.base.errors import InvariantError
from headrace.base.ids import RequestId
from headrace.kv.prefix_hash import NO_EXTRAS
from headrace.kv.sequence import SequenceKv
from headrace.sched.queues import WaitingQueue, order_key
from headrace.sched.request import Request, RequestState
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams


def make_request(name: str, key: tuple[float, int]) -> Request:
    source = EngineRequest(request_id=RequestId(name), prompt_token_ids=[1], sampling=SamplingParams(seed=0))
    return Request(source, order_key=key, limit_tokens=10, kv=SequenceKv(1, extras=NO_EXTRAS, prompt_tokens=1))


def test_the_key_depends_on_the_policy() -> None:
    source = EngineRequest(
        request_id=RequestId("a"), prompt_token_ids=[1], sampling=SamplingParams(seed=0), arrival_s=2.5, priority=7
    )
    assert order_key(source, "fcfs", 10.0, 3) == (2.5, 3)
    assert order_key(source, "priority", 10.0, 3) == (72.5, 3)


def test_a_request_that_comes_back_takes_its_old_place() -> None:
    queue = WaitingQueue()
    first, second, third = (make_request(str(place), (float(place), place)) for place in range(3))
    for request in (third, first, second):
        queue.push(request)
    assert queue.at(0) is first
    queue.remove(first)
    queue.remove(third)
    queue.push(first)
    assert queue.requests() == [first, second]
    assert len(queue) == 2


def test_removing_a_stranger_is_a_bug() -> None:
    queue = WaitingQueue()
    queue.push(make_request("a", (0.0, 0)))
    with pytest.raises(InvariantError, match="not in the waiting queue"):
        queue.remove(make_request("b", (0.0, 0)))


def test_states_change_only_along_the_arrows() -> None:
    request = make_request("a", (0.0, 0))
    for state in (RequestState.RUNNING, RequestState.PREEMPTED, RequestState.RUNNING, RequestState.FINISHED):
        request.move_to(state)
    with pytest.raises(InvariantError, match="FINISHED -> RUNNING"):
        request.move_to(RequestState.RUNNING)
    with pytest.raises(InvariantError, match="WAITING -> PREEMPTED"):
        make_request("b", (0.0, 1)).move_to(RequestState.PREEMPTED)

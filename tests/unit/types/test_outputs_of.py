"""News of several steps in one message: what stays a column, and in which order it is taken."""

from headrace.base.ids import RequestId
from headrace.types.outputs import RequestDelta, StepNews
from headrace.types.wire import outputs_of

A, B = RequestId("a"), RequestId("b")


def delta(name: RequestId, token: int) -> RequestDelta:
    return RequestDelta(request_id=name, new_token_ids=[token], cached_tokens=3)


def test_the_news_of_one_step_are_passed_on_as_they_are() -> None:
    outputs = outputs_of([StepNews([A], [5], [delta(B, 6)])], None)
    assert (outputs.request_ids, outputs.token_ids, outputs.deltas) == ([A], [5], [delta(B, 6)])


def test_columns_of_earlier_steps_become_deltas_so_that_each_request_keeps_its_order() -> None:
    steps = [StepNews([A], [1], [delta(B, 2)]), StepNews([B], [3], [delta(A, 4)]), StepNews([A, B], [5, 6], [])]
    outputs = outputs_of(steps, None)
    assert (outputs.request_ids, outputs.token_ids) == ([A, B], [5, 6])
    taken: dict[RequestId, list[int]] = {A: [], B: []}
    for item in outputs.each():
        taken[item.request_id] += item.new_token_ids
    assert taken == {A: [1, 4, 5], B: [2, 3, 6]}


def test_no_news_are_an_empty_message() -> None:
    assert list(outputs_of([], None).each()) == []

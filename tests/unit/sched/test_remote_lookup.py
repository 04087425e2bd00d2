"""Where an outside store is asked, and what is local and what external then: the table and the vectors of the gate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.base.errors import InvariantError
from headrace.kv.groups import GroupHit
from headrace.kv.sequence import Hit
from headrace.sched.remote import RemoteGate
from headrace.tiers.connector import ConnectorCapabilities
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout, KvLayout, RecurrentSpec
from headrace.types.events import LookupDone

FULL = FullAttentionSpec(1, 8, 8, 2)
STATE = RecurrentSpec(())


class Store:
    """A connector that answers as told and writes down what it was asked."""

    def __init__(self, answer: int | None = 0, *, capable: bool = False) -> None:
        self.answer = answer
        self.capabilities = ConnectorCapabilities(divergent_hits=capable)
        self.asked: list[tuple[int, int]] = []
        self.finished: list[str] = []

    def lookup(self, request_id, hashes, local_tokens, limit_tokens):
        self.asked.append((local_tokens, limit_tokens))
        return self.answer

    def load_planned(self, job):
        raise AssertionError("nothing is loaded here")

    def request_finished(self, request_id):
        self.finished.append(request_id)


class Blocks:
    """A coordinator that finds what it is told to find."""

    memory = SimpleNamespace(pools=[])

    def __init__(self, common: Hit, each: list[GroupHit] | None = None, hash_tokens: int = 2) -> None:
        self.common, self.each, self.hash_tokens = common, each, hash_tokens
        self.calls: list[str] = []

    def find_hit(self, kv, token_ids):
        self.calls.append("common")
        return self.common

    def group_hits(self, kv, token_ids):
        self.calls.append("each")
        assert self.each is not None, "no look-up of each group was expected"
        return self.each

    def no_hit(self):
        return Hit(0, [GroupHit(0, []), GroupHit(0, [])], 0)


def layout(block_tokens: int) -> KvLayout:
    return KvLayout([GroupLayout(0, FULL, [0], block_tokens, 99), GroupLayout(1, STATE, [1], 0, 99)], 4096, 64, 1)


def full(tokens: int, block: int) -> GroupHit:
    blocks = list(range(1, tokens // block + 1))
    return GroupHit(tokens, blocks, 90 if tokens % block else None)


def state(tokens: int) -> GroupHit:
    return GroupHit(tokens, [], 91) if tokens else GroupHit(0, [])


def hybrid(tokens: int, block: int) -> Hit:
    return Hit(tokens, [full(tokens, block), state(tokens)], 0)


def request(tokens: int = 129, **facts: object) -> SimpleNamespace:
    kv = SimpleNamespace(hashes=[bytes(32)] * (tokens // 2), cacheable=True)
    return SimpleNamespace(
        **{"request_id": "r", "token_ids": [0] * tokens, "kv": kv, "wants_prompt_logprobs": False, **facts}
    )


# capable, hit of the full group, of the states, of both, the store's answer -> asked at, local, external.
TABLE = [
    (False, 64, 32, 32, 0, 32, 32, 0),
    (False, 64, 32, 32, 48, 32, 32, 48),
    (True, 64, 32, 32, 0, 64, 32, 0),
    (True, 64, 32, 32, 32, 64, 64, 32),
    (True, 32, 64, 32, 16, 32, 32, 16),
    (True, 32, 64, 0, 16, 0, 0, 16),
    (True, 70, 32, 32, 4, 64, 32, 0),
    (True, 70, 32, 32, 8, 64, 64, 8),
    (True, 64, 64, 64, 0, 64, 64, 0),
]


@pytest.mark.parametrize(("capable", "fa", "mamba", "both", "answer", "asked_at", "local", "external"), TABLE)
def test_the_table(capable, fa, mamba, both, answer, asked_at, local, external):
    store = Store(answer, capable=capable)
    kv = Blocks(hybrid(both, 16), [full(fa, 16), state(mamba)] if capable else None)
    offer = RemoteGate(store, kv, layout(16)).offer(request(), 0.0)
    assert [place for place, _ in store.asked] == [asked_at]
    assert (offer.hit.tokens, offer.external_tokens) == (local, external)
    if external:
        # The load brings the state of its end; a copy of an older one would race it.
        assert offer.hit.parts[1] == GroupHit(0, [])
        assert offer.hit.parts[0] == GroupHit(local, list(range(1, local // 16 + 1)))
    else:
        assert offer.hit is kv.common or fa == mamba


def test_a_store_without_the_capability_never_sees_the_groups_apart():
    kv = Blocks(hybrid(32, 16), None)
    offer = RemoteGate(Store(0), kv, layout(16)).offer(request(), 0.0)
    assert kv.calls == ["common"]
    assert offer.hit is kv.common


def test_a_capable_store_does_not_need_the_common_lookup():
    # Hash unit 2, blocks of 4, six tokens of the full group and none of the state: kept as they are for the store.
    kv = Blocks(hybrid(0, 4), [full(6, 4), state(0)])
    offer = RemoteGate(Store(4, capable=True), kv, layout(4)).offer(request(9), 0.0)
    assert kv.calls == ["each"]
    assert (offer.hit.tokens, offer.external_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("each", "local"),
    [((64, 32), 64), ((32, 64), 16)],
)
def test_published_vectors_of_129_tokens_in_blocks_of_16(each, local):
    kv = Blocks(hybrid(16, 16), [full(each[0], 16), state(each[1])])
    store = Store(16, capable=True)
    offer = RemoteGate(store, kv, layout(16)).offer(request(129), 0.0)
    assert offer.hit.tokens == local
    assert store.asked == [(local, 128)]


def test_a_tail_is_replaced_by_a_longer_answer():
    # Local 5, blocks of 16, the store says 8: it is asked at 0, the tail goes, 8 tokens come from outside.
    kv = Blocks(Hit(5, [full(5, 16), GroupHit(0, [])], 0), hash_tokens=1)
    store = Store(8)
    offer = RemoteGate(store, kv, layout(16)).offer(request(40), 0.0)
    assert [place for place, _ in store.asked] == [0]
    assert (offer.hit.tokens, offer.external_tokens) == (0, 8)
    assert offer.hit.parts[0] == GroupHit(0, [])


@pytest.mark.parametrize("answer", [0, 3, 5])
def test_a_tail_as_long_as_the_answer_is_kept(answer):
    kv = Blocks(Hit(5, [full(5, 16), GroupHit(0, [])], 0), hash_tokens=1)
    offer = RemoteGate(Store(answer), kv, layout(16)).offer(request(40), 0.0)
    assert (offer.hit, offer.external_tokens) == (kv.common, 0)


def test_cutting_a_hit_is_a_view():
    gate = RemoteGate(Store(0), Blocks(hybrid(0, 2)), layout(2))
    hit = Hit(6, [GroupHit(6, [1, 2, 3]), GroupHit(6, [], 91)], 4)
    cut = gate._cut(hit, 4)
    assert [part.table for part in cut.parts] == [[1, 2], []]
    assert (cut.tokens, cut.shared_boundary_tokens) == (4, 0)
    assert hit.parts == [GroupHit(6, [1, 2, 3]), GroupHit(6, [], 91)]
    # Only the state may be shorter; a group that keeps tokens must have them.
    with pytest.raises(InvariantError, match="is cut to 6"):
        gate._cut(Hit(6, [GroupHit(2, [1]), GroupHit(6, [], 91)], 0), 6)


def test_places_without_a_block_stay_when_a_hit_is_cut():
    gate = RemoteGate(Store(0), Blocks(hybrid(0, 2)), layout(2))
    cut = gate._cut(Hit(6, [GroupHit(6, [0, 0, 3]), GroupHit(0, [])], 0), 4)
    assert cut.parts[0] == GroupHit(4, [0, 0])


def test_the_capability_is_read_at_every_use():
    store = Store(0, capable=False)
    kv = Blocks(hybrid(32, 16), [full(64, 16), state(32)])
    gate = RemoteGate(store, kv, layout(16))
    gate.offer(request(), 0.0)
    store.capabilities = ConnectorCapabilities(divergent_hits=True)
    gate.offer(request(request_id="s"), 0.0)
    assert [place for place, _ in store.asked] == [32, 64]


def test_the_last_token_is_never_loaded():
    store = Store(0)
    RemoteGate(store, Blocks(hybrid(0, 16)), layout(16)).offer(request(64), 0.0)
    assert store.asked == [(0, 62)]


@pytest.mark.parametrize("answer", [-2, 64, 3])
def test_an_impossible_answer_is_a_fault_of_the_connector(answer):
    gate = RemoteGate(Store(answer), Blocks(hybrid(0, 16)), layout(16))
    with pytest.raises(InvariantError, match="the connector offers"):
        gate.offer(request(64), 0.0)


def test_who_wants_all_logits_is_offered_nothing():
    store = Store(16)
    offer = RemoteGate(store, Blocks(hybrid(32, 16)), layout(16)).offer(request(wants_prompt_logprobs=True), 0.0)
    assert (offer.hit.tokens, offer.external_tokens, store.asked) == (0, 0, [])


# "Ask later".


def test_a_request_told_to_ask_later_waits_for_the_call():
    store = Store(None)
    gate = RemoteGate(store, Blocks(hybrid(32, 16)), layout(16), lookup_timeout_s=2.0)
    waiting = request()
    assert gate.offer(waiting, 10.0) is None
    assert gate.offer(waiting, 11.0) is None
    assert len(store.asked) == 1
    assert gate.next_deadline_s == 12.0
    gate.lookup_done(LookupDone("nobody"))
    gate.lookup_done(LookupDone("r"))
    store.answer = 16
    assert gate.offer(waiting, 11.5).external_tokens == 16
    assert gate.next_deadline_s is None


def test_a_lookup_that_takes_too_long_is_given_up_for_good():
    store = Store(None)
    kv = Blocks(hybrid(32, 16))
    gate = RemoteGate(store, kv, layout(16), lookup_timeout_s=2.0)
    waiting = request()
    assert gate.offer(waiting, 10.0) is None
    offer = gate.offer(waiting, 12.0)
    assert (offer.hit, offer.external_tokens) == (kv.common, 0)
    assert gate.next_deadline_s is None
    gate.lookup_done(LookupDone("r"))
    assert gate.offer(waiting, 13.0).hit is kv.common
    assert len(store.asked) == 1


def test_asking_again_does_not_extend_the_time():
    store = Store(None)
    gate = RemoteGate(store, Blocks(hybrid(32, 16)), layout(16), lookup_timeout_s=2.0)
    waiting = request()
    for now_s in (10.0, 11.0, 11.9):
        assert gate.offer(waiting, now_s) is None
        gate.lookup_done(LookupDone("r"))
    assert gate.offer(waiting, 12.5) is None, "the answer of the call may be there: it is asked once more"
    assert gate.offer(waiting, 12.6) is not None
    assert len(store.asked) == 4


def test_the_store_hears_of_the_end_once_and_only_if_it_was_asked():
    store = Store(0)
    gate = RemoteGate(store, Blocks(hybrid(32, 16)), layout(16))
    asked, other = request(), request(request_id="s", wants_prompt_logprobs=True)
    gate.offer(asked, 0.0)
    gate.offer(asked, 1.0)
    gate.offer(other, 0.0)
    for _ in range(2):
        gate.finished(asked)
        gate.finished(other)
    assert store.finished == ["r"]


def test_a_sequence_without_hashes_of_its_own_asks_for_nothing():
    store, kv = Store(32), Blocks(hybrid(32, 16))
    asking = request()
    asking.kv.cacheable = False
    offer = RemoteGate(store, kv, layout(16)).offer(asking, 0.0)
    assert (offer.hit.tokens, offer.external_tokens, store.asked) == (0, 0, [])

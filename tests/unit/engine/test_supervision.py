from __future__ import annotations

from headrace.base.ids import RequestId
from headrace.engine.supervision import CLEARING_TOKENS, CrashLedger, RestartBudget

A, B, C, D = (RequestId(name) for name in "ABCD")


def test_one_crash_fails_nobody() -> None:
    ledger = CrashLedger()
    assert ledger.on_crash([A, B], {A, B}) == []
    assert not ledger.held


def test_a_lone_suspect_is_failed_at_the_second_crash() -> None:
    ledger = CrashLedger()
    ledger.on_crash([A, B], {A, B})
    assert ledger.on_crash([A, B], {A}) == [A]
    assert ledger.on_crash([B], {B}) == [], "B was not on the device in the crash before"


def test_progress_in_between_clears() -> None:
    ledger = CrashLedger()
    ledger.on_crash([A], {A})
    ledger.delivered(A, CLEARING_TOKENS)
    assert ledger.on_crash([A], {A}) == []
    ledger.delivered(A, CLEARING_TOKENS - 1)
    assert ledger.on_crash([A], {A}) == [A]


def test_suspects_go_on_one_at_a_time_and_only_the_cause_is_failed() -> None:
    ledger = CrashLedger()
    ledger.on_crash([A, B, C, D], {A, B, C})
    assert ledger.on_crash([A, B, C, D], {A, B, C}) == []
    assert ledger.held == {A, B, C}
    assert ledger.next_trial() == A
    assert ledger.next_trial() is None, "one at a time"
    assert not ledger.delivered(A, 1)
    assert ledger.delivered(A, CLEARING_TOKENS), "A is cleared"
    assert ledger.next_trial() == B
    assert ledger.on_crash([A, B, C, D], {A, B, D}) == [B]
    assert ledger.held == {C}
    assert ledger.next_trial() == C
    assert ledger.forget(C)
    assert ledger.next_trial() is None


def test_the_end_of_a_trial_lets_the_next_one_on() -> None:
    ledger = CrashLedger()
    ledger.on_crash([A, B], None)
    ledger.on_crash([A, B], None)
    assert ledger.next_trial() == A
    assert ledger.forget(A)
    assert ledger.next_trial() == B
    assert not ledger.forget(C)


def test_unknown_means_all_that_were_with_the_core() -> None:
    ledger = CrashLedger()
    ledger.on_crash([A, B, C], None)
    assert ledger.on_crash([A, B, C], None) == []
    assert ledger.held == {A, B, C}
    assert ledger.next_trial() == A
    assert ledger.on_crash([A, B, C], None) == [A]
    assert ledger.held == {B, C}, "held requests were not with the core"


def test_an_aborted_suspect_is_not_held() -> None:
    ledger = CrashLedger()
    ledger.on_crash([A, B, C], None)
    ledger.on_crash([A, B, C], None)
    ledger.forget(B)
    assert ledger.held == {A, C}


def test_budget_counts_within_the_window() -> None:
    budget = RestartBudget(2, window_s=600.0)
    assert budget.allows(0.0)
    assert budget.allows(1.0)
    assert not budget.allows(2.0)
    assert not budget.allows(600.5)
    assert budget.allows(1300.0)
    assert not RestartBudget(0).allows(0.0)

"""Hundreds of fixed seeds and a few fresh ones; and proof that the interesting things really happened."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from headrace.sched.draft import StepDraft
from headrace.sim.swarm import run_seed

FIXED_SEEDS = 400
FRESH_SEEDS = 40
MUST_HAPPEN = (
    "preemptions",
    "preempted in flight",
    "victims already planned",
    "hit tokens",
    "evictions",
    "aborts running",
    "aborts waiting",
    "rows dropped",
    "slots reused in one plan",
    "finish stop",
    "finish length",
    "error non_finite_logits",
    "error kv_cache_too_small",
    "error context_length_exceeded",
    "error invalid_request",
    "error overloaded",
)


def run(seed: int) -> Counter[str]:
    try:
        return run_seed(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}; repeat: headrace sim --seed {seed} --steps 0 --trace") from error


def test_fixed_seeds_hold_every_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    remove = StepDraft.remove

    def counted(draft: StepDraft, request: object) -> None:
        planned = len(draft.rows) + len(draft.decodes)
        remove(draft, request)
        counts["victims already planned"] += planned - len(draft.rows) - len(draft.decodes)

    monkeypatch.setattr(StepDraft, "remove", counted)
    for seed in range(FIXED_SEEDS):
        counts += run(seed)
    missing = [name for name in MUST_HAPPEN if counts[name] < 5]
    print(dict(counts))
    assert not missing, f"too rare to have been tested: {missing} of {dict(counts)}"


def test_fresh_seeds_hold_every_invariant() -> None:
    """Other seeds each time; a failure names its own."""
    first = int.from_bytes(os.urandom(4), "little")
    seeds = range(first, first + FRESH_SEEDS)
    print(f"fresh seeds {seeds[0]}..{seeds[-1]}")
    for seed in seeds:
        run(seed)

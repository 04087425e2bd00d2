"""``headrace sim``: exit codes, the JSON line, the story of a run, and a planted fault that it finds."""

import json

import pytest

from headrace.kv.pool import BlockPool


def document(ran):
    return json.loads(ran.out.splitlines()[-1])


def test_seeds_that_pass(headrace):
    ran = headrace("sim", "--seeds", "12", "--first-seed", "7", "--steps", "20", "--processes", "1")
    assert (ran.code, ran.err) == (0, "")
    assert "12 seeds" in ran.out
    found = document(ran)
    assert (found["kind"], found["seeds"], found["first_seed"], found["failed_seed"]) == ("sim", 12, 7, None)
    assert found["counts"]["steps"] == found["steps"] >= 12 * 20
    assert found["never_happened"] == []


def test_two_processes_say_the_same(headrace_process):
    documents = []
    for processes in ("1", "2"):
        ran = headrace_process("sim", "--seeds", "20", "--steps", "10", "--processes", processes)
        assert (ran.code, ran.err) == (0, "")
        documents.append(document(ran))
        documents[-1].pop("seconds")
    assert documents[0] == documents[1]


def test_the_story_of_one_run(headrace):
    ran = headrace("sim", "--seed", "3", "--trace", "--steps", "40")
    assert ran.code == 0
    for word in ("slots", "post r1: prompt", "plan: r1[0:", "takes slot", "device runs it", "apply", "finishes by"):
        assert word in ran.out
    assert document(ran)["seeds"] == 1


def test_a_planted_fault_is_found_told_and_cut_down(headrace, monkeypatch):
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)
    ran = headrace("sim", "--seeds", "60", "--processes", "1", "--steps", "100")
    assert ran.code == 1
    found = document(ran)
    seed, step = found["failed_seed"], found["failed_step"]
    assert found["seeds"] == seed
    assert found["error"]
    assert 0 < found["events_shrunk"] < found["events"]
    assert f"FAILED: seed {seed}, step {step}" in ran.out
    assert f"headrace sim --seed {seed} --trace --steps 100\n" in ran.out
    again = headrace("sim", "--seed", str(seed), "--trace", "--steps", "100")
    assert again.code == 1
    assert f"FAILED: seed {seed}, step {step}" in again.out
    last = [line for line in again.out.splitlines() if line.startswith("step ")][-1]
    assert "FAILED" in last
    repeated = document(again)
    assert [repeated[key] for key in ("error", "failed_step", "events_shrunk")] == [
        found[key] for key in ("error", "failed_step", "events_shrunk")
    ]


def test_what_never_happens_is_a_failure(headrace, monkeypatch):
    from headrace.sim import campaign

    monkeypatch.setattr(campaign, "JUDGED_FROM_STEPS", 2)
    ran = headrace("sim", "--seeds", "2", "--steps", "0", "--processes", "1")
    assert ran.code == 1
    assert "NEVER HAPPENED: " in ran.out
    assert document(ran)["never_happened"]
    assert document(ran)["failed_seed"] is None


def test_fresh_seeds_are_printed(headrace):
    ran = headrace("sim", "--minutes", "0", "--steps", "0", "--processes", "1")
    found = document(ran)
    assert found["failed_seed"] is None, ran.out
    assert ran.out.startswith(f"fresh seeds from {found['first_seed']} on")
    assert found["seeds"] == 10


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "1", "--seeds", "2"], "--seeds and --seed exclude one another"),
        (["--trace"], "--trace needs --seed"),
        (["--minutes", "1", "--first-seed", "4"], "--first-seed needs --seeds"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--sead", "1"], "did you mean --seed?"),
    ],
)
def test_wrong_usage(headrace, words, says):
    ran = headrace("sim", *words)
    assert ran.code == 2
    assert says in ran.err

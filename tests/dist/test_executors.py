"""Executors: order, one result for all ranks, and what becomes of a rank that dies, raises, hangs or is orphaned."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from dist_workers import LAYOUT, Make, make_bulk, plan

from headrace.base.errors import EngineUnavailableError, InsufficientMemoryError, InvariantError
from headrace.parallel.executor import InlineExecutor
from headrace.parallel.executor_multiprocess import MultiprocessExecutor
from headrace.parallel.rendezvous import PrivateFolder, single_node

DEADLINE_S = 120.0


def gone(pids):
    """True once none of the processes is alive; waits a bounded time for the system to notice."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=20)
    return not alive


def listening_beyond_loopback(pids):
    """Listening sockets of the ranks that another machine could reach."""
    sockets = [socket for pid in pids for socket in psutil.Process(pid).net_connections("inet")]
    listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return [ip for ip in listening if not ip.startswith("127.") and ip not in ("::1", "::ffff:127.0.0.1")]


@pytest.fixture
def executor_of(tmp_path):
    """Make executors that are closed after the test, whatever happens in it."""
    made = []

    def make(**options):
        executor = MultiprocessExecutor(
            Make(**options), 2, str(tmp_path), start_timeout_s=DEADLINE_S, collective_timeout_s=60.0
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


def test_inline_runs_in_order():
    executor = InlineExecutor(Make())
    with pytest.raises(InvariantError):
        executor.allocate(LAYOUT)
    assert executor.start().cache_bytes == 1000
    executor.allocate(LAYOUT)
    executor.submit(plan(1))
    executor.submit(plan(2))
    assert [executor.collect().rows[0].token_ids for _ in range(2)] == [[1], [2]]
    with pytest.raises(InvariantError):
        executor.collect()
    executor.close()
    executor.close()


def test_two_ranks_answer_as_one_and_a_killed_rank_is_a_typed_error(executor_of, tmp_path):
    executor = executor_of(fault="kill", fault_step=9)
    facts = executor.start()
    assert (facts.cache_bytes, facts.vocab_tokens, facts.phases[0].name) == (999, 40, "x")
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    executor.allocate(LAYOUT)
    for step in (1, 2):
        executor.submit(plan(step, rows=3))
    results = [executor.collect() for _ in range(2)]
    assert [result.step for result in results] == [1, 2]
    assert [[row.token_ids for row in result.rows] for result in results] == [[[3]] * 3, [[6]] * 3]

    pids = executor.pids
    assert listening_beyond_loopback(pids) == []
    executor.submit(plan(9))
    begun = time.monotonic()
    with pytest.raises(EngineUnavailableError, match=r"rank 1: killed by SIGKILL \(exit code -9\)"):
        executor.collect()
    assert time.monotonic() - begun < 30
    executor.close()
    assert gone(pids)
    assert list(tmp_path.iterdir()) == []
    executor.close()


def test_a_rank_that_raises_is_named_with_its_text(executor_of):
    executor = executor_of(fault="raise", fault_step=1)
    executor.start()
    executor.allocate(LAYOUT)
    pids = executor.pids
    executor.submit(plan(1))
    with pytest.raises(EngineUnavailableError, match="rank 1: ZeroDivisionError: a fault on order"):
        executor.collect()
    executor.close()
    assert gone(pids)


def test_what_loading_raises_keeps_its_type_and_leaves_nothing(executor_of, tmp_path, caplog):
    executor = executor_of(fault="load")
    with pytest.raises(InsufficientMemoryError, match="7 GiB wanted") as caught:
        executor.start()
    assert caught.value.param == "max_model_len"
    assert "Traceback" not in caplog.text
    assert executor.pids == []
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_hangs_is_ended_within_bounds(tmp_path):
    executor = MultiprocessExecutor(Make("hang", 1), 2, str(tmp_path), close_timeout_s=0.5)
    executor.start()
    executor.allocate(LAYOUT)
    executor.submit(plan(1))
    pids, begun = executor.pids, time.monotonic()
    executor.close()
    assert time.monotonic() - begun < 15
    assert gone(pids)


def test_large_plans_and_large_results_in_flight_do_not_block_each_other(tmp_path):
    executor = MultiprocessExecutor(make_bulk, 1, str(tmp_path))
    try:
        executor.start()
        executor.allocate(LAYOUT)
        for step in range(3):
            executor.submit(plan(step, rows=60_000))
        results = [executor.collect() for _ in range(3)]
    finally:
        executor.close()
    assert [(result.step, len(result.rows[0].token_ids)) for result in results] == [(n, 500_000) for n in range(3)]


ORPHANING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from dist_workers import LAYOUT, Make, make_bulk, plan
from headrace.parallel.executor_multiprocess import MultiprocessExecutor
if __name__ == "__main__":
    executor = MultiprocessExecutor(Make("hang", 1), 2, sys.argv[2])
    executor.start()
    executor.allocate(LAYOUT)
    executor.submit(plan(1))
    assert "torch" not in sys.modules
    print(*executor.pids, flush=True)
    executor.collect()
"""


def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    """Also in the middle of a step that never ends; and the parent itself never imports torch."""
    script = tmp_path / "orphaning.py"
    script.write_text(ORPHANING)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            processes = [psutil.Process(pid) for pid in pids]
        finally:
            os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_two_rendezvous_differ_and_lie_in_a_private_folder(tmp_path):
    first, second = PrivateFolder(str(tmp_path)), PrivateFolder(str(tmp_path))
    methods = {single_node(folder.path) for folder in (first, first, second, second)}
    assert len(methods) == 4
    assert all(method.startswith(f"file://{tmp_path}") for method in methods)
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    for folder in (first, second, first):
        folder.remove()
    assert list(tmp_path.iterdir()) == []

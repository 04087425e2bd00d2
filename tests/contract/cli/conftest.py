"""Run the command line in this process, or in one of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Ran:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def headrace(capsys, monkeypatch):
    """Return a function that runs a command in this process."""
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    from headrace.cli.main import main

    def run(*argv):
        code = main(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def headrace_process():
    """Return a function that runs a command in a process of its own."""

    def run(*argv, stdin=None, **environ):
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *argv],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env={**os.environ, **environ},
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run

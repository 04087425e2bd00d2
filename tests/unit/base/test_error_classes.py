"""The error hierarchy: stable codes, statuses and what reaches a user."""

import subprocess
import sys

import pytest

from headrace.base import errors
from headrace.base.errors import HeadraceError, InvariantError, RequestError, invariant

CLASSES = sorted(
    (item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, HeadraceError)),
    key=lambda item: item.__name__,
)


def test_codes_are_unique_so_that_a_class_is_found_by_its_code():
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_can_become_an_http_answer(cls):
    error = cls("what to do", param="field")
    assert 400 <= cls.http_status < 600
    assert cls.kind.endswith("_error")
    assert (error.message, error.param, str(error)) == ("what to do", "field", "what to do")
    assert cls.__doc__


def test_only_busy_and_restarting_servers_are_worth_a_retry():
    assert {cls.code for cls in CLASSES if cls.retryable} == {"overloaded", "engine_unavailable"}
    assert all(cls.http_status == 503 for cls in CLASSES if cls.retryable)


def test_an_error_of_a_client_is_never_a_500():
    assert all(cls.http_status != 500 for cls in CLASSES if issubclass(cls, RequestError))


def test_invariant_passes_and_fails():
    invariant(True, "not raised")
    with pytest.raises(InvariantError, match="broken fact"):
        invariant(False, "broken fact")


def test_invariant_survives_optimised_mode():
    code = "from headrace.base.errors import invariant; invariant(False, 'still checked')"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "still checked" in done.stderr

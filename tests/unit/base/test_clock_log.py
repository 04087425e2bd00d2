"""Clocks and the logger."""

import logging

import pytest

from headrace.base.clock import ManualClock, SystemClock
from headrace.base.errors import ConfigError
from headrace.base.log import adopt_logger, get_logger, setup_logging


def test_the_manual_clock_moves_only_when_told():
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(0.25)
    assert clock.now_s() == 5.25


def test_the_system_clock_never_goes_back():
    clock = SystemClock()
    times = [clock.now_s() for _ in range(100)]
    assert times == sorted(times)


@pytest.fixture
def bare_logger():
    """The package's logger without handlers; put back as it was afterwards."""
    root = logging.getLogger("headrace")
    saved = (root.handlers[:], root.level, root.propagate)
    root.handlers[:] = []
    # pytest puts handlers of its own on a logger that does not propagate, and an earlier test may have set this one up.
    root.propagate = True
    yield root
    root.handlers[:] = saved[0]
    root.setLevel(saved[1])
    root.propagate = saved[2]


def test_lines_go_to_standard_error_with_the_process_name(bare_logger, capsys):
    setup_logging("core 100%")
    get_logger("headrace.somewhere").warning("value %d", 7)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[core 100%] ")
    assert "W headrace.somewhere: value 7" in err


def test_a_library_speaks_in_the_same_form(bare_logger, capsys):
    setup_logging()
    adopt_logger("some_library")
    logging.getLogger("some_library.part").warning("odd bytes")
    logging.getLogger("some_library.part").info("chatter")
    assert capsys.readouterr().err.endswith(" W some_library.part: odd bytes\n")


def test_set_up_twice_is_one_handler(bare_logger):
    setup_logging()
    setup_logging()
    assert len(bare_logger.handlers) == 1


def test_a_wrong_level_is_a_typed_error_and_leaves_no_handler(bare_logger, monkeypatch):
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "shout")
    with pytest.raises(ConfigError, match="HEADRACE_LOG_LEVEL"):
        setup_logging()
    assert bare_logger.handlers == []

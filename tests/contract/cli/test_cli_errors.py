"""Every error ends a command with one line and the right exit code."""

import pytest

from headrace.base.errors import EngineUnavailableError, RequestError
from headrace.cli.present import error_line, exit_code, report_error


def one_line(ran):
    """The error line of a command that failed; checks that there is nothing else."""
    [line] = ran.err.splitlines()
    assert line.startswith("headrace: error: ")
    assert ran.out == ""
    return line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["srve"], "unknown command 'srve' (did you mean serve?)"),
        (["--verion"], "unknown option '--verion'"),
        (["serve", "--max-modle-len", "3"], "unknown flag --max-modle-len (did you mean --max-model-len?)"),
        (["serve", "--max_num_seq", "3"], "unknown flag --max-num-seq (did you mean --max-num-seqs?)"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port", "many"], "'many' is not an integer"),
        (["serve", "--port", "70000"], "--port must be at most 65535, got 70000"),
        (["serve", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["serve", "--port"], "expected one argument"),
        (["serve", "--trust-remote-code"], "--trust-remote-code is not supported"),
        (["serve", "--max-num-seqs", "4k"], "--max-num-batched-tokens must be at least --max-num-seqs"),
        (["serve", "--help=nothing-like-this"], "Topics: model, cache, scheduler, parallel, events, server"),
        (["bench", "latncy"], "unknown benchmark 'latncy' (did you mean latency?)"),
        (["bench", "latency", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["bench", "serve", "--endpoint", "chat", "--prompt-kind", "ids"], "--prompt-kind ids needs"),
        (["bench", "serve", "--token-id-low", "9", "--token-id-high", "9"], "must be above"),
        (["bench", "serve", "--url", "ftp://x"], "is not the URL of a server"),
        (["plan", "--device", "h20"], "unknown device 'h20' (did you mean h200?)"),
        (["plan", "--device"], "--device needs a name"),
        (["plan", "no/such/model.gguf", "--device", "h200"], "no such file"),
        (["chat", ""], "the question is empty"),
        (["complete", "  "], "the text is empty"),
        (["complete", "x", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["chat", "x", "--temperature", "-1"], "--temperature must be at least 0"),
        (["doctor", "--jsn"], "unknown flag --jsn (did you mean --json?)"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(headrace, argv, says):
    ran = headrace(*argv)
    assert ran.code == 2
    assert says in one_line(ran)


@pytest.mark.parametrize("command", ["serve", "complete"])
def test_a_wrong_environment_is_found_before_any_work(headrace, monkeypatch, command):
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "banana")
    ran = headrace(command, "x")
    assert ran.code == 2
    assert "HEADRACE_LOG_LEVEL='banana': expected one of DEBUG" in one_line(ran)


def test_a_server_that_is_not_there_is_code_1(headrace, tmp_path):
    ran = headrace("complete", "x", "--url", "http://127.0.0.1:1")
    assert ran.code == 1
    assert "is the server running there? Start one with: headrace serve" in one_line(ran)


def test_no_command_shows_the_overview_and_code_2(headrace):
    ran = headrace()
    assert ran.code == 2
    assert "usage: headrace COMMAND" in ran.out


def test_version(headrace):
    from headrace import __version__

    assert headrace("--version").out == f"headrace {__version__}\n"


def test_exit_codes_of_exceptions():
    assert exit_code(RequestError("x")) == 2
    assert exit_code(EngineUnavailableError("x")) == 1
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(RuntimeError()) == 1
    assert exit_code(SystemExit(3)) == 3
    assert exit_code(SystemExit(None)) == 0


def test_error_lines_say_what_to_do():
    assert error_line(EngineUnavailableError("first\n  second")) == "error: first second"
    assert "HEADRACE_TRACEBACK=1" in error_line(KeyError("k"))
    assert "headrace doctor" in error_line(ModuleNotFoundError("No module named 'x'"))
    assert "headrace plan" in error_line(MemoryError())


def test_traceback_only_on_request(capsys, monkeypatch):
    def fail():
        raise EngineUnavailableError("the reason")

    def report():
        with pytest.raises(EngineUnavailableError) as caught:
            fail()
        assert report_error(caught.value) == 1
        return capsys.readouterr().err

    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    assert report() == "headrace: error: the reason\n"
    monkeypatch.setenv("HEADRACE_TRACEBACK", "1")
    text = report()
    assert "Traceback (most recent call last)" in text
    assert text.endswith("headrace: error: the reason\n")


def test_an_unreadable_traceback_switch_does_not_hide_the_error(capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_TRACEBACK", "perhaps")
    assert report_error(EngineUnavailableError("the reason")) == 1
    assert capsys.readouterr().err.endswith("headrace: error: the reason\n")


def test_an_interrupt_in_a_command_is_code_130(headrace, monkeypatch):
    import headrace.cli.doctor as doctor

    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    ran = headrace("doctor")
    assert (ran.code, ran.err) == (130, "headrace: interrupted\n")


def test_a_reader_that_leaves_is_no_traceback(headrace_process):
    import subprocess
    import sys

    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{sys.executable}' -m headrace serve --help | true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr

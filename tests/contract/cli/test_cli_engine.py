"""The commands that run an engine, from the command line down to a core process, on a device that only hashes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.bench.report import LatencyReport, SchedulerReport, StartupReport, ThroughputReport, parse_report

COMMAND = Path(__file__).with_name("cli_on_fake_device.py")
PARTS = COMMAND.parents[2] / "engine_parts"
sys.path.insert(0, str(PARTS))
SMALL = ("--load-format", "dummy", "--num-blocks-override", "400", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from fake_device import write_model

    return str(write_model(tmp_path_factory.mktemp("model") / "bytes"))


@pytest.fixture
def environ(monkeypatch):
    path = os.pathsep.join(filter(None, [str(PARTS), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("HEADRACE_RUNTIME_DIR", raising=False)
    return dict(os.environ)


def on_fake_device(environ, *argv, stdin=None):
    return subprocess.run(
        [sys.executable, COMMAND, *argv], input=stdin, capture_output=True, text=True, timeout=120, env=environ
    )


def test_complete_prints_what_the_model_says_and_nothing_else(environ, model_dir):
    from fake_device import expected_text

    done = on_fake_device(environ, "complete", "once", "--model", model_dir, *SMALL, "--max-tokens", "12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected_text(list(b"once"), 12) + "\n"


def test_chat_from_a_pipe(environ, model_dir):
    from fake_device import expected_text

    done = on_fake_device(environ, "chat", "--model", model_dir, *SMALL, "--max-tokens", "12", stdin="hi")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected_text(list(b"user: hi\nassistant:"), 12) + "\n"


def test_a_request_that_cannot_be_served_is_one_line(environ, model_dir):
    done = on_fake_device(environ, "complete", "once", "--model", model_dir, *SMALL, "--max-tokens", "5000")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "lower max_tokens" in line


def test_serve_ends_in_good_order_and_bench_serve_measures_it(environ, model_dir, headrace):
    server = subprocess.Popen(
        [sys.executable, COMMAND, "serve", model_dir, *SMALL, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    try:
        line = next(text for text in server.stdout if "is ready" in text)
        url = next(word for word in line.split() if word.startswith("http"))
        arguments = ("--url", url, "--num-prompts", "8", "--input-len", "9", "--output-len", "5", "--token-id-low", "9")
        ran = headrace("bench", "serve", *arguments, "--token-id-high", "200", "--max-concurrency", "4")
        assert ran.code == 0, ran.err
        assert headrace("chat", "hi", "--url", url, "--max-tokens", "4").code == 0
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def offline(environ, monkeypatch):
    """The offline class on the fake device."""
    import fake_device

    import headrace.llm

    monkeypatch.setattr(headrace.llm, "make_executor", lambda config, folder, files: fake_device.make(config, folder))


def last_line(capfd):
    captured = capfd.readouterr()
    [line] = captured.out.splitlines()
    return parse_report(line)


def test_bench_latency(offline, model_dir, capfd):
    from headrace.cli.main import main

    arguments = ["--batch-size", "3", "--input-len", "10", "--output-len", "6", "--iterations", "2"]
    assert main(["bench", "latency", model_dir, *SMALL, "--device", "cpu", *arguments]) == 0
    report = last_line(capfd)
    assert isinstance(report, LatencyReport)
    assert (report.batch_size, report.input_len, report.output_len, report.iterations) == (3, 10, 6, 2)
    assert report.percentiles["ttft_ms"].samples == 2
    assert (report.device, report.dtype, report.quantization) == ("cpu", "float32", "none")
    assert report.tokens_per_s == pytest.approx(18 / (report.e2e_ms / 1e3), rel=1e-4)


def test_bench_throughput(offline, model_dir, capfd):
    from headrace.cli.main import main

    arguments = ["--num-prompts", "12", "--input-len", "10", "--output-len", "6"]
    assert main(["bench", "throughput", model_dir, *SMALL, *arguments]) == 0
    report = last_line(capfd)
    assert isinstance(report, ThroughputReport)
    assert (report.input_tokens, report.output_tokens) == (120, 72)
    assert report.output_tokens_per_s == pytest.approx(72 / report.elapsed_s, rel=1e-4)


async def test_bench_startup(environ, model_dir):
    from headrace.bench.startup import StartupOptions, measure

    options = StartupOptions(cold_starts=1, warm_starts=1)
    report = await measure(model_dir, [], SMALL, options, (sys.executable, str(COMMAND)))
    assert isinstance(report, StartupReport)
    assert [run.kind for run in report.runs] == ["cold", "warm"]
    assert all(0 < run.ready_s < run.first_answer_s for run in report.runs)
    assert report.warm_first_answer_s == report.runs[1].first_answer_s
    assert parse_report(msgspec.json.encode(report)) == report


async def test_a_server_that_does_not_start_is_an_error_with_its_last_line(environ):
    from headrace.base.errors import EngineUnavailableError
    from headrace.bench.startup import StartupOptions, measure

    with pytest.raises(EngineUnavailableError, match="no such file or directory"):
        await measure("no/such/model/here", [], [], StartupOptions(cold_starts=0, warm_starts=1))


def test_files_are_dropped_from_the_page_cache(tmp_path):
    from headrace.bench.startup import evict

    path = tmp_path / "weights"
    path.write_bytes(b"x" * 8192)
    assert evict([path]) == 1
    assert path.read_bytes() == b"x" * 8192


def test_bench_scheduler(capfd):
    from headrace.cli.main import main

    sizes = ["--short-context-tokens", "512", "--long-context-tokens", "600"]
    assert main(["bench", "scheduler", "--running", "16", "--steps", "10", *sizes]) == 0
    report = last_line(capfd)
    assert isinstance(report, SchedulerReport)
    assert (report.running, len(report.cells)) == (16, 4)

"""The server from bind to exit: addresses, early listening, draining, signals, exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from http_fake_engine import FakeHealth, FakeTextEngine, Hold

from headrace.base.errors import AddressInUseError, ConfigError, WeightLoadError
from headrace.config import ServerConfig
from headrace.engine.request_output import OutputChunk
from headrace.serve.listen import bind
from headrace.serve.server import _with_environment

BODY = {"prompt": "x", "stream": True}


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, timeout=20, trust_env=False)


def test_port_zero_reports_the_port():
    with bind(ServerConfig(port=0)) as listener:
        port = int(listener.url.rsplit(":", 1)[1])
        assert port == listener.socket.getsockname()[1] > 0
        assert f"{listener.url}/v1/chat/completions" in listener.curl(chat=True, with_key=False)
        assert "HEADRACE_API_KEY" in listener.curl(chat=False, with_key=True)
        assert '{"prompt":[1,2,3]}' in listener.curl(chat=False, with_key=False, takes_text=False)


def test_a_port_in_use_names_its_owner_and_the_cure():
    with bind(ServerConfig(port=0)) as listener:
        port = int(listener.url.rsplit(":", 1)[1])
        with pytest.raises(AddressInUseError, match="--port 0") as caught:
            bind(ServerConfig(port=port))
        assert f"port {port}" in caught.value.message
        assert f"process {os.getpid()}" in caught.value.message
        assert caught.value.param == "port"


@pytest.mark.parametrize(
    ("host", "words"),
    [("203.0.113.1", "not an address of this machine"), ("no such host", "--host"), ("not..valid", "not a host name")],
)
def test_wrong_hosts(host: str, words: str):
    with pytest.raises(ConfigError, match=words):
        bind(ServerConfig(host=host, port=0))


def test_all_interfaces_are_shown_as_one_that_can_be_called():
    with bind(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert listener.url.startswith("http://127.0.0.1:")


def test_unix_socket(tmp_path: Path):
    path = str(tmp_path / "s")
    with bind(ServerConfig(uds=path)), pytest.raises(AddressInUseError, match="another server"):
        bind(ServerConfig(uds=path))
    assert not os.path.exists(path)
    # A socket that a killed server left behind is taken over.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with bind(ServerConfig(uds=path)) as listener:
        assert path in listener.curl(chat=True, with_key=False)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind(ServerConfig(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"


def test_requests_through_a_unix_socket(new_server, tmp_path: Path):
    path = str(tmp_path / "s")
    with (
        new_server(uds=path) as server,
        httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url=server.url, trust_env=False) as client,
    ):
        assert client.get("/health").status_code == 200
    with bind(ServerConfig(uds=path)) as listener:
        assert listener.name == f"unix:{path}"


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="--api-key is empty"):
        _with_environment(ServerConfig(api_key=("good", " ")))


def test_the_key_of_the_environment_is_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "from-env")
    assert _with_environment(ServerConfig(api_key=("flag",))).api_key == ("flag", "from-env")
    monkeypatch.delenv("HEADRACE_API_KEY")
    assert _with_environment(ServerConfig()).api_key == ()


def test_it_answers_while_the_model_loads(new_server, capsys: pytest.CaptureFixture[str]):
    engine = FakeTextEngine()
    gate = engine.start_gate = Hold()
    with new_server(engine) as server:
        assert gate.reached.wait(10)
        health = get(server.url, "/health")
        assert (health.status_code, health.json()["state"]) == (503, "starting")
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert refused.status_code == 503
        assert "loading" in refused.json()["error"]["message"]
        assert "is ready" not in capsys.readouterr().out
        gate.release()
        while get(server.url, "/health").status_code != 200:
            pass
    shown = capsys.readouterr()
    assert f"Headrace is ready: {server.url}" in shown.out
    assert "curl -s" in shown.out
    assert "nothing" in shown.err
    assert "0.25" in shown.err
    assert (server.exit_status, engine.stopped) == (0, True)


def test_a_failed_start_ends_the_server_with_the_cause(new_server):
    engine = FakeTextEngine()
    engine.start_error = WeightLoadError("tensor lm_head.weight is missing")
    with new_server(engine) as server:
        server.join()
    assert isinstance(server.failure, WeightLoadError)
    assert engine.stopped
    with pytest.raises(httpx.ConnectError):
        get(server.url, "/health")


def test_stopping_while_the_model_loads(new_server):
    engine = FakeTextEngine()
    gate = engine.start_gate = Hold()
    with new_server(engine) as server:
        assert gate.reached.wait(10)
    assert (server.exit_status, server.failure, engine.stopped) == (0, None, True)


def test_an_engine_that_gave_up_ends_the_server(new_server):
    engine = FakeTextEngine()
    with new_server(engine) as server:
        while get(server.url, "/health").status_code != 200:
            pass
        engine.fake_health = FakeHealth(state="failed", reason="six crashes")
        server.join()
    assert server.exit_status == 1
    assert engine.stopped


def test_running_requests_may_finish(new_server):
    """Told to stop, the server takes nothing new, and lets a running stream come to its end."""
    engine = FakeTextEngine()
    hold = Hold()
    engine.script = lambda call: [
        OutputChunk(0, "first", [1], prompt_token_ids=[5]), hold, OutputChunk(0, "last", [2], finish_reason="stop")
    ]  # fmt: skip
    with (
        new_server(engine, shutdown_timeout_s=20.0) as server,
        httpx.Client(trust_env=False, timeout=20) as client,
        client.stream("POST", server.url + "/v1/completions", json=BODY) as response,
    ):
        assert hold.reached.wait(10)
        server.stop()
        while not server.state.stopping:
            pass
        assert not engine.stopped
        hold.release()
        text = "".join(response.iter_text())
    assert "last" in text
    assert "[DONE]" in text
    assert "error" not in text
    assert (server.exit_status, engine.stopped) == (0, True)


@pytest.mark.parametrize("stream", [True, False])
def test_running_requests_are_ended_when_their_time_is_over(new_server, stream: bool):
    engine = FakeTextEngine()
    hold = Hold()
    engine.script = lambda call: [OutputChunk(0, "first", [1], prompt_token_ids=[5]), hold]
    answers = []

    def ask(url: str) -> None:
        answers.append(httpx.post(url, json={**BODY, "stream": stream}, trust_env=False, timeout=20))

    with new_server(engine, shutdown_timeout_s=0.1) as server:
        asker = threading.Thread(target=ask, args=(server.url + "/v1/completions",))
        asker.start()
        assert hold.reached.wait(10)
        server.stop()
        asker.join(20)
    assert engine.calls[0].closed.wait(5)
    assert server.exit_status == 0
    if stream:
        events = answers[0].text.strip().split("\n\n")
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_unavailable"
        assert events[-1] == "data: [DONE]"
    else:
        assert answers[0].status_code == 503
        assert "shutting down" in answers[0].json()["error"]["message"]


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_signals(signals: list[int]):
    """One signal stops in good order; a second one does not wait for running requests. Both exit with status 0."""
    patience_s = "0.2" if len(signals) == 1 else "1000"
    script = Path(__file__).with_name("http_signal_server.py")
    process = subprocess.Popen(
        [sys.executable, script, patience_s], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        while "is ready" not in line:
            line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://"))
        with (
            httpx.Client(trust_env=False, timeout=20) as client,
            client.stream("POST", url + "/v1/completions", json=BODY) as response,
        ):
            text = response.iter_text()
            seen = next(text)
            process.send_signal(signals[0])
            for number in signals[1:]:
                # The second signal has to come after the first was taken.
                while _accepts(url):
                    pass
                process.send_signal(number)
            seen += "".join(text)
        assert "shutting down" in seen
        assert seen.endswith("data: [DONE]\n\n")
        assert process.wait(20) == 0


def _accepts(url: str) -> bool:
    try:
        get(url, "/health")
    except httpx.TransportError:
        return False
    return True

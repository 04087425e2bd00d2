"""``bench serve`` against a small server that streams, refuses, breaks off and sends errors."""

import asyncio

import pytest

from headrace.base.errors import ConfigError, EngineUnavailableError
from headrace.bench.http_client import Client, ServerAnswerError, parse_endpoint
from headrace.bench.load import Answer
from headrace.bench.serve import ServeBenchOptions, measure, metrics_of


def options(fake, **changes):
    defaults = {"num_prompts": 6, "input_len": 5, "output_len": 4, "warmup_requests": 0}
    return ServeBenchOptions(url=fake.url, **{**defaults, **changes})


async def test_a_run_counts_by_the_servers_usage(fake_server):
    report = await measure(options(fake_server, max_concurrency=2))
    assert (report.completed, report.failed, report.first_error) == (6, 0, None)
    assert (report.input_tokens, report.output_tokens, report.tokens_counted_by) == (42, 24, "server")
    assert report.percentiles["ttft_ms"].samples == 6
    assert report.percentiles["itl_ms"].samples == 18
    assert report.model == "fake-model"
    assert report.ttft_ms > 0
    assert report.e2e_ms >= report.ttft_ms
    assert report.output_tokens_per_s == pytest.approx(24 / report.elapsed_s)


async def test_the_requests_are_what_was_asked_for(fake_server):
    await measure(options(fake_server, temperature=0.5))
    assert len(fake_server.requests) == 6
    for body in fake_server.requests:
        assert body["max_tokens"] == 4
        assert body["temperature"] == 0.5
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 5
        assert all(isinstance(token, int) for token in body["prompt"])


async def test_the_warm_up_has_other_prompts_and_is_not_counted(fake_server):
    report = await measure(options(fake_server, warmup_requests=2))
    prompts = [tuple(body["prompt"]) for body in fake_server.requests]
    assert len(prompts) == len(set(prompts)) == 8
    assert report.num_prompts == 6


async def test_chat_and_no_ignore_eos(fake_server):
    report = await measure(options(fake_server, endpoint="chat", ignore_eos=False, model="m"))
    assert (report.prompt_kind, report.completed, report.output_tokens) == ("text", 6, 24)
    assert "ignore_eos" not in fake_server.requests[0]
    assert len(fake_server.requests[0]["messages"][0]["content"].split()) == 5


async def test_a_server_without_usage_is_counted_by_events(fake_server):
    fake_server.usage = False
    report = await measure(options(fake_server))
    assert (report.tokens_counted_by, report.input_tokens, report.output_tokens) == ("client", 30, 24)


async def test_concurrency_is_kept_and_connections_are_used_again(fake_server):
    fake_server.gate, fake_server.open_gate_at = asyncio.Event(), 3  # nobody is answered before three are there
    await measure(options(fake_server, num_prompts=20, max_concurrency=3, model="m"))
    assert fake_server.running_max == 3
    assert fake_server.connections == 3


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"status": 400}, "answered 400: no, because of a reason"),
        ({"break_off_after": 2}, "closed the connection in the middle of an answer"),
        ({"stream_error": True}, "the engine stumbled"),
    ],
)
async def test_failures_are_counted_and_the_first_is_named(fake_server, fault, says):
    for name, value in fault.items():
        setattr(fake_server, name, value)
    report = await measure(options(fake_server))
    assert (report.completed, report.failed) == (0, 6)
    assert says in report.first_error
    assert report.output_tokens == 0


async def test_an_answer_that_takes_too_long_fails(fake_server):
    fake_server.gate = asyncio.Event()
    report = await measure(options(fake_server, num_prompts=1, timeout_s=0.05))
    fake_server.gate.set()
    assert "--timeout-s 0.05" in report.first_error


async def test_a_refused_warm_up_ends_the_command(fake_server):
    fake_server.status = 401
    with pytest.raises(ServerAnswerError, match="warm-up request failed"):
        await measure(options(fake_server, warmup_requests=1))


async def test_the_key_is_sent(fake_server, monkeypatch):
    await measure(options(fake_server, num_prompts=1, api_key="k1"))
    assert "Authorization: Bearer k1" in fake_server.headers[-1]
    monkeypatch.setenv("HEADRACE_API_KEY", "k2")
    await measure(options(fake_server, num_prompts=1))
    assert "Authorization: Bearer k2" in fake_server.headers[-1]


def test_token_ids_need_the_completions_api():
    with pytest.raises(ConfigError, match="chat messages are text"):
        asyncio.run(measure(ServeBenchOptions(endpoint="chat", prompt_kind="ids")))


def test_metrics_by_hand():
    answers = [Answer(0, 10.0, [10.5, 10.6, 10.8]), Answer(1, 20.0, [20.1])]
    table = metrics_of(answers, [3, 1])
    assert table["ttft_ms"].mean == pytest.approx(300)
    assert table["tpot_ms"].mean == pytest.approx(150)
    assert table["tpot_ms"].samples == 1
    assert (table["itl_ms"].min, table["itl_ms"].max) == (pytest.approx(100), pytest.approx(200))
    assert table["e2e_ms"].max == pytest.approx(800)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a:1/v1/", "http://a:1"),
        ("a:8000", "http://a:8000"),
        ("https://b", "https://b:443"),
        ("http://b/sub/v1", "http://b:80/sub"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_urls(text, url):
    assert parse_endpoint(text).url == url


@pytest.mark.parametrize("text", ["", "http://", "ftp://a", "http://a:b", "http://a?x=1"])
def test_urls_that_are_none(text):
    with pytest.raises(ConfigError, match="--url"):
        parse_endpoint(text)


async def test_what_is_no_http_is_a_clear_error():
    async def handle(reader, writer):
        await reader.readline()
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = Client(parse_endpoint(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    with pytest.raises(EngineUnavailableError, match="does not speak HTTP"):
        await client.request("GET", "/health")
    server.close()

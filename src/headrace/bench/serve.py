"""``bench serve``: load on any server with OpenAI's API, measured from the client.

Uses nothing of the engine: the server may be of another make and on another machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from headrace.base import env
from headrace.base.errors import ConfigError, HeadraceError
from headrace.bench.http_client import Client, Endpoint, ServerAnswerError, error_text, parse_endpoint
from headrace.bench.load import Answer, LoadRequest, drive, lengths, make_load, poisson_arrivals_s
from headrace.bench.report import Percentiles, ServeReport, environment, say, show_percentiles, summarize
from headrace.config.option import option


@dataclass(frozen=True)
class ServeBenchOptions:
    """Load on a server."""

    url: str = option("http://127.0.0.1:8000", "Server, with or without /v1.")
    model: str | None = option(None, "Model name to send (default: the first of /v1/models).")
    api_key: str | None = option(None, "Sent as bearer token (default: HEADRACE_API_KEY).")
    endpoint: str = option("completions", "API to call.", choices=("completions", "chat"))
    prompt_kind: str = option(
        "auto", "ids: token ids; text: words. auto: ids for completions.", choices=("auto", "ids", "text")
    )
    num_prompts: int = option(100, "Requests to send.", low=1)
    max_concurrency: int | None = option(None, "Most requests in flight (default: no limit).", low=1)
    request_rate: float | None = option(None, "Mean arrivals a second, Poisson (default: all at once).", low=1e-9)
    input_len: int = option(128, "Prompt tokens (words, for text) of each request.", low=1)
    output_len: int = option(128, "Output tokens of each request.", low=1)
    lengths: str = option("fixed", "mixed: lognormal lengths like chat traffic.", choices=("fixed", "mixed"))
    token_id_low: int = option(1000, "Smallest token id of ids prompts.", low=0)
    token_id_high: int = option(30000, "Token ids of ids prompts are below this.", low=1)
    ignore_eos: bool = option(
        True, "Ask for exactly --output-len tokens (an extension; servers without it need --no-ignore-eos)."
    )
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", low=0.0)
    warmup_requests: int = option(1, "Requests before the run that are not counted.", low=0)
    timeout_s: float = option(600.0, "Longest wait for one answer in seconds.", low=0.001)
    seed: int = option(0, "Seed of arrivals, lengths and prompts.")


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


class Sender:
    """Sends one request of a load and notes when its tokens arrive."""

    def __init__(self, client: Client, options: ServeBenchOptions, model: str) -> None:
        self._client = client
        self._options = options
        self._model = model
        self._path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Return the JSON document of a request."""
        options = self._options
        document: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_len,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.endpoint == "chat":
            document["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            document["prompt"] = request.prompt
        if options.ignore_eos:
            document["ignore_eos"] = True
        return document

    async def send(self, request: LoadRequest) -> Answer:
        """Send one request; a failure is noted in the answer."""
        answer = Answer(request.index)
        problems: list[str] = []

        def on_event(data: bytes, now_s: float) -> None:
            if data == b"[DONE]":
                return
            event = _EVENT.decode(data)
            if event.error is not None:
                problems.append(error_text(data))
            if event.usage is not None:
                answer.input_tokens, answer.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            for choice in event.choices:
                if choice.text or (choice.delta is not None and choice.delta.content):
                    answer.token_times_s.append(now_s)

        answer.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                reply = await self._client.request("POST", self._path, self.body(request), on_event)
            reply.require_ok(self._client.endpoint, self._path)
        except TimeoutError:
            problems.append(f"no complete answer within --timeout-s {self._options.timeout_s:g}")
        except HeadraceError as error:
            problems.append(error.message)
        if not problems and not answer.token_times_s and not answer.output_tokens:
            problems.append("the answer had no output")
        answer.error = problems[0] if problems else None
        return answer


async def first_model(client: Client) -> str:
    """Return the name of the first model that a server lists.

    Raises:
        EngineUnavailableError: the server cannot be reached.
        ServerAnswerError: it lists none.
    """
    reply = await client.request("GET", "/v1/models")
    reply.require_ok(client.endpoint, "/v1/models")
    document = reply.json()
    try:
        return str(document["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerAnswerError(f"{client.endpoint.url}/v1/models lists no model; name one with --model") from None


def prompt_kind(options: ServeBenchOptions) -> str:
    """Return "ids" or "text".

    Raises:
        ConfigError: token ids for the chat API.
    """
    if options.endpoint == "chat":
        if options.prompt_kind == "ids":
            raise ConfigError(
                "--prompt-kind ids needs --endpoint completions: chat messages are text", param="prompt_kind"
            )
        return "text"
    return "ids" if options.prompt_kind == "auto" else options.prompt_kind


def build_load(options: ServeBenchOptions) -> list[LoadRequest]:
    """Return the requests of a run.

    Raises:
        ConfigError: an empty range of token ids.
    """
    if options.token_id_low >= options.token_id_high:
        raise ConfigError("--token-id-high must be above --token-id-low", param="token_id_high")
    count, seed = options.num_prompts, options.seed
    return make_load(
        lengths(options.lengths, count, options.input_len, options.output_len, seed),
        poisson_arrivals_s(count, options.request_rate, seed),
        kind=prompt_kind(options),
        token_ids=(options.token_id_low, options.token_id_high),
        seed=seed,
    )


def warmup_load(options: ServeBenchOptions) -> list[LoadRequest]:
    """Return requests like those of the run with other prompts, so that none of the run is in a prefix cache."""
    if not options.warmup_requests:
        return []
    count, seed = options.warmup_requests, ~options.seed
    return build_load(dataclasses.replace(options, num_prompts=count, seed=seed, request_rate=None))


def metrics_of(answers: list[Answer], output_tokens: list[int]) -> dict[str, Percentiles]:
    """Return the percentiles of TTFT, TPOT, ITL and E2E in milliseconds.

    Args:
        answers: completed requests.
        output_tokens: of each.
    """
    ttft: list[float] = []
    tpot: list[float] = []
    itl: list[float] = []
    e2e: list[float] = []
    for answer, tokens in zip(answers, output_tokens, strict=True):
        times = answer.token_times_s
        if not times:
            continue
        ttft.append((times[0] - answer.sent_s) * 1e3)
        e2e.append((times[-1] - answer.sent_s) * 1e3)
        itl.extend((later - earlier) * 1e3 for earlier, later in pairwise(times))
        if tokens > 1:
            tpot.append((times[-1] - times[0]) * 1e3 / (tokens - 1))
    return {"ttft_ms": summarize(ttft), "tpot_ms": summarize(tpot), "itl_ms": summarize(itl), "e2e_ms": summarize(e2e)}


def report_of(
    options: ServeBenchOptions,
    endpoint: Endpoint,
    model: str,
    load: list[LoadRequest],
    answers: list[Answer],
    elapsed_s: float,
    client_cpu_s: float,
) -> ServeReport:
    """Return the report of a finished run."""
    good = [answer for answer in answers if answer.error is None]
    counted = bool(good) and all(answer.output_tokens is not None for answer in good)
    outputs = [answer.output_tokens if counted else len(answer.token_times_s) for answer in good]
    inputs = [answer.input_tokens if counted else load[answer.index].input_len for answer in good]
    output_tokens, input_tokens = sum(outputs), sum(inputs)  # type: ignore[arg-type]
    table = metrics_of(good, outputs)  # type: ignore[arg-type]
    return ServeReport(
        url=endpoint.url,
        model=model,
        endpoint=options.endpoint,
        prompt_kind=prompt_kind(options),
        lengths=options.lengths,
        seed=options.seed,
        num_prompts=len(load),
        completed=len(good),
        failed=len(answers) - len(good),
        first_error=next((answer.error for answer in answers if answer.error is not None), None),
        max_concurrency=options.max_concurrency,
        request_rate=options.request_rate,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tokens_counted_by="server" if counted else "client",
        elapsed_s=elapsed_s,
        requests_per_s=len(good) / elapsed_s,
        output_tokens_per_s=output_tokens / elapsed_s,
        total_tokens_per_s=(input_tokens + output_tokens) / elapsed_s,
        ttft_ms=table["ttft_ms"].median,
        tpot_ms=table["tpot_ms"].median,
        itl_ms=table["itl_ms"].median,
        e2e_ms=table["e2e_ms"].median,
        percentiles=table,
        client_cpu_s=client_cpu_s,
        environment=environment(),
    )


async def measure(options: ServeBenchOptions) -> ServeReport:
    """Run the load and return its report.

    Raises:
        EngineUnavailableError: the server cannot be reached.
        ServerAnswerError: it refused the warm-up request or lists no model.
        ConfigError: options that do not go together.
    """
    load = build_load(options)
    client = Client(parse_endpoint(options.url, options.api_key or env.read("HEADRACE_API_KEY")))
    try:
        model = options.model or await first_model(client)
        sender = Sender(client, options, model)
        for request in warmup_load(options):
            answer = await sender.send(request)
            if answer.error is not None:
                raise ServerAnswerError(f"the warm-up request failed: {answer.error}")
        say(f"{len(load)} requests to {client.endpoint.url}, model {model}")
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        answers = await drive(load, sender.send, options.max_concurrency)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    finally:
        client.close()
    return report_of(options, client.endpoint, model, load, answers, elapsed_s, cpu_s)


def run(options: ServeBenchOptions) -> ServeReport:
    """Run the load, print the table for people and return the report; raises as `measure`."""
    report = asyncio.run(measure(options))
    show_percentiles(report.percentiles)
    say(f"{report.completed} completed, {report.failed} failed in {report.elapsed_s:.2f} s")
    say(f"{report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s")
    if report.first_error is not None:
        say(f"first failure: {report.first_error}")
    return report

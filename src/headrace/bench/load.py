"""The load: what requests arrive, when, and how they are driven through a client with few or many in flight.

Arrivals, lengths and prompts are functions of a seed. Must not know HTTP: the caller passes in how one request is sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.base.errors import ConfigError

_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
    "or",
    "had",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "all",
    "her",
    "she",
    "there",
    "would",
    "their",
    "we",
    "him",
    "been",
    "has",
    "when",
    "who",
    "will",
    "no",
    "more",
    "if",
    "out",
    "so",
    "up",
    "said",
    "what",
    "its",
    "about",
    "than",
    "into",
    "them",
    "can",
    "only",
    "other",
    "time",
    "new",
    "some",
    "could",
    "these",
    "two",
    "may",
    "first",
    "then",
    "do",
    "any",
    "like",
    "my",
    "now",
    "over",
    "such",
    "our",
    "man",
    "me",
    "even",
    "most",
    "made",
    "after",
]


@dataclass(frozen=True)
class LoadRequest:
    """One request to send.

    Attributes:
        index: place in the load.
        arrival_s: seconds after the start at which it may be sent.
        input_len: prompt tokens (words, for text).
        output_len: output tokens asked for.
        prompt: token ids or text.
    """

    index: int
    arrival_s: float
    input_len: int
    output_len: int
    prompt: list[int] | str


@dataclass
class Answer:
    """What the client saw of one request; times are seconds of `time.perf_counter`.

    Attributes:
        index: place in the load.
        sent_s: when it was sent.
        token_times_s: arrival of each streamed event that carried output.
        output_tokens: as the server counts, or None.
        input_tokens: as the server counts, or None.
        error: why it failed, or None.
    """

    index: int
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    input_tokens: int | None = None
    error: str | None = None


def poisson_arrivals_s(count: int, rate_per_s: float | None, seed: int) -> list[float]:
    """Return ascending arrival times in seconds, the first at 0.

    Args:
        count: how many.
        rate_per_s: mean arrivals a second: gaps are exponential with mean 1 / rate. None: all at 0.
        seed: of the gaps.

    Raises:
        ConfigError: the rate is not above 0.
    """
    if rate_per_s is None:
        return [0.0] * count
    if not rate_per_s > 0:
        raise ConfigError(
            f"--request-rate must be above 0, got {rate_per_s}; leave it out to send all at once",
            param="request_rate",
        )
    source = random.Random(f"arrivals {seed}")
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += source.expovariate(rate_per_s)
    return times


def lengths(kind: str, count: int, input_len: int, output_len: int, seed: int) -> list[tuple[int, int]]:
    """Return (input, output) lengths in tokens.

    Args:
        kind: "fixed": all alike; "mixed": lognormal like chat traffic, input exp(N(5.4, 1.0)) in [8, 4096] and output
            exp(N(5.0, 0.8)) in [8, 1024]; ``input_len`` and ``output_len`` are then not used.
        count: how many.
        input_len: of the fixed kind.
        output_len: of the fixed kind.
        seed: of the mixed kind.
    """
    if kind == "fixed":
        return [(input_len, output_len)] * count
    source = random.Random(f"lengths {seed}")
    pairs = []
    for _ in range(count):
        inputs = _clamped(source.lognormvariate(5.4, 1.0), 4096)
        pairs.append((inputs, _clamped(source.lognormvariate(5.0, 0.8), 1024)))
    return pairs


def _clamped(value: float, most: int) -> int:
    return max(8, min(most, int(value)))


def token_prompt(length: int, low: int, high: int, source: random.Random) -> list[int]:
    """Return random token ids in [low, high)."""
    return [source.randrange(low, high) for _ in range(length)]


def text_prompt(words: int, source: random.Random) -> str:
    """Return a text of common English words; most tokenizers make about one token of each."""
    return " ".join(source.choice(_WORDS) for _ in range(words))


def make_load(
    pairs: Sequence[tuple[int, int]], arrivals_s: Sequence[float], *, kind: str, token_ids: tuple[int, int], seed: int
) -> list[LoadRequest]:
    """Return the requests of a run. No two prompts share a beginning, so that a prefix cache does not help.

    Args:
        pairs: (input, output) lengths in tokens.
        arrivals_s: when each may be sent.
        kind: "ids" or "text".
        token_ids: range [low, high) of the ids.
        seed: of the prompts.
    """
    source = random.Random(f"prompts {seed}")
    return [
        LoadRequest(
            index,
            arrival_s,
            input_len,
            output_len,
            token_prompt(input_len, *token_ids, source) if kind == "ids" else text_prompt(input_len, source),
        )
        for index, ((input_len, output_len), arrival_s) in enumerate(zip(pairs, arrivals_s, strict=True))
    ]


async def drive(
    load: Sequence[LoadRequest],
    send: Callable[[LoadRequest], Awaitable[Answer]],
    max_concurrency: int | None,
    on_done: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Send every request at its arrival time, or later when ``max_concurrency`` are in flight.

    Args:
        load: requests, ascending by arrival.
        send: sends one and returns what came back; must not raise for a failed request.
        max_concurrency: most in flight; None: no limit.
        on_done: called after each answer.

    Returns:
        The answers, in the order of ``load``.
    """
    gate = asyncio.Semaphore(max_concurrency if max_concurrency is not None else max(1, len(load)))
    start_s = time.perf_counter()

    async def one(request: LoadRequest) -> Answer:
        try:
            answer = await send(request)
        finally:
            gate.release()
        on_done(answer)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in load:
            wait_s = start_s + request.arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await gate.acquire()
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]

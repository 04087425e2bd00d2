"""Running a generation request on the engine: prompts in, numbered chunks out, tokens counted, metrics recorded.

Must not know the shape of any answer.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.serve.context import ServeState
from headrace.serve.stream import merge
from headrace.serve.time_limit import NO_LIMIT, TimeLimit
from headrace.types.sampling import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.request_output import OutputChunk
    from headrace.serve.openai.schema_common import SamplingFields

MAX_SEQUENCES = 4096
"""Most outputs of one HTTP request (prompts x n)."""

Chunks = AsyncGenerator[tuple[int, "OutputChunk"], None]


@dataclass(frozen=True)
class GenerationJob:
    """One HTTP request as the engine sees it.

    Attributes:
        answer_id: id in the answer.
        prompts: texts or token ids; output ``i`` of prompt ``p`` is choice ``p * n + i``.
        sampling: common to all prompts.
        priority: smaller runs earlier.
        cache_salt: separates prefix-cache entries.
        add_special_tokens: for prompts given as text.
        tenant: whose quota the request counts towards.
        limit: how long it may live.
    """

    answer_id: str
    prompts: Sequence[str | list[int]]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    tenant: str | None = None
    limit: TimeLimit = NO_LIMIT

    @property
    def sequences(self) -> int:
        """Number of choices."""
        return len(self.prompts) * self.sampling.n


class UsageTally:
    """Counts the tokens of one HTTP request as chunks pass by."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion_tokens = 0

    def prompt(self, number: int, tokens: int, cached_tokens: int) -> bool:
        """Record a prompt; return False if it was there already (a further choice of the same prompt)."""
        if number in self._prompts:
            return False
        self._prompts[number] = (tokens, cached_tokens)
        return True

    def document(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


async def run_job(state: ServeState, job: GenerationJob, tally: UsageTally) -> Chunks:
    """Yield (choice, chunk) of all prompts as they come. Closing it aborts everything in the engine.

    Raises:
        HeadraceError: what the engine refused or what failed, for any of the prompts.
    """
    sampling = job.sampling
    streams = [
        # An async generator, so that it can be closed; the engine's interface says "iterator".
        cast(
            "AsyncGenerator[OutputChunk, None]",
            state.engine.stream(
                prompt,
                sampling,
                request_id=f"{job.answer_id}-{number}",
                priority=job.priority,
                cache_salt=job.cache_salt,
                add_special_tokens=job.add_special_tokens,
                tenant=job.tenant,
                timeout_s=job.limit.seconds or None,
            ),
        )
        for number, prompt in enumerate(job.prompts)
    ]
    track = state.metrics.begin(job.sequences)
    ended = "abort"
    try:
        async with aclosing(merge(streams)) as chunks:
            async for number, chunk in chunks:
                choice = number * sampling.n + chunk.index
                if chunk.prompt_token_ids:
                    tokens = len(chunk.prompt_token_ids)
                    if tally.prompt(number, tokens, chunk.cached_tokens):
                        track.prompt(tokens, chunk.cached_tokens)
                    if chunk.queued_s is not None:
                        track.queued(chunk.queued_s)
                new_tokens = len(chunk.token_ids)
                tally.completion_tokens += new_tokens
                track.output(choice, new_tokens)
                if chunk.finish_reason is not None:
                    track.finish(choice, chunk.finish_reason)
                yield choice, chunk
    except Exception:
        ended = "error"
        raise
    finally:
        track.finish_rest(ended)


def answer_id(prefix: str, body: SamplingFields, request: Request) -> str:
    """Return the id of an answer: made from the client's request id if there is one."""
    given = body.request_id or request.scope.get("headrace_client_request_id")
    return f"{prefix}-{given or uuid.uuid4().hex}"


def check_stream_options(body: SamplingFields) -> None:
    """Refuse stream options without a stream.

    Raises:
        RequestError: naming the field.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")


def check_sequences(job: GenerationJob) -> None:
    """Bound the outputs of one request.

    Raises:
        RequestError: too many.
    """
    if job.sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(job.prompts)} prompts x n={job.sampling.n} are {job.sequences} outputs; "
            f"one request may have {MAX_SEQUENCES}",
            param="prompt",
        )


def truncate(ids: list[int], body: SamplingFields, *, room_tokens: int) -> list[int]:
    """Shorten a prompt as the request asks.

    Args:
        ids: the prompt.
        body: has ``truncate_prompt_tokens`` (-1: to ``room_tokens``) and ``truncation_side`` (default left).
        room_tokens: most prompt tokens that fit beside the output.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        keep = room_tokens
    if keep < 1:
        raise RequestError("truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens")
    if len(ids) <= keep:
        return ids
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def json_answer(document: Any) -> Response:
    """Return a document as a JSON answer."""
    return Response(msgspec.json.encode(document), media_type="application/json")

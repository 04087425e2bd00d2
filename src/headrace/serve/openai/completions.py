"""``POST /v1/completions``: text in, text out, with the classic ``echo`` and ``logprobs``.

A streamed and a plain answer are made from the same pieces, so they cannot differ. Must not know the engine's inside.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import invariant
from headrace.serve.context import ServeState, state_of
from headrace.serve.generation import (
    Chunks,
    GenerationJob,
    UsageTally,
    answer_id,
    check_sequences,
    check_stream_options,
    json_answer,
    run_job,
    truncate,
)
from headrace.serve.interrupt import Interruptible
from headrace.serve.limits import body_of
from headrace.serve.openai.completions_schema import CompletionAnswer, CompletionRequest
from headrace.serve.openai.documented import documents
from headrace.serve.openai.logprobs import ClassicLogprobs, prompt_entries
from headrace.serve.openai.sampling import completion_max_tokens, sampling_params
from headrace.serve.openai.tokens import encode
from headrace.serve.stream import EventStream
from headrace.serve.tenants import salt_of, tenant_of
from headrace.serve.time_limit import time_limit

if TYPE_CHECKING:
    from headrace.engine.request_output import OutputChunk

router = APIRouter(tags=["OpenAI"])
_encode = msgspec.json.Encoder().encode


@router.post(
    "/v1/completions", response_model=CompletionAnswer, **documents(CompletionRequest, stream=CompletionAnswer)
)
async def completions(
    request: Request,
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))],
    state: Annotated[ServeState, Depends(state_of)],
) -> Response:
    """Complete one or several prompts."""
    state.require_ready()
    state.require_model(body.model)
    body.check_refused()
    check_stream_options(body)
    job = await _job(state, body, request)
    writer = CompletionWriter(state, body, job)
    if body.stream:
        return EventStream(state, writer.events(), job.limit)
    async with Interruptible(state, request.receive, job.limit):
        return json_answer(await writer.collect())


async def _job(state: ServeState, body: CompletionRequest, request: Request) -> GenerationJob:
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    sampling = sampling_params(
        body,
        state.engine.defaults,
        max_tokens=completion_max_tokens(body, state.engine.defaults),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    job = GenerationJob(
        answer_id=answer_id("cmpl", body, request),
        prompts=_prompts(body),
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=salt_of(state.config, request, body.cache_salt),
        tenant=tenant_of(request),
        limit=time_limit(body, state.config.request_timeout_s),
        add_special_tokens=body.add_special_tokens is not False,
    )
    check_sequences(job)
    if body.truncate_prompt_tokens is None:
        return job
    return await _truncated(state, body, job)


async def _truncated(state: ServeState, body: CompletionRequest, job: GenerationJob) -> GenerationJob:
    room_tokens = state.engine.max_model_len - (job.sampling.max_tokens or 1)
    prompts: list[str | list[int]] = []
    for prompt in job.prompts:
        ids = prompt if isinstance(prompt, list) else await encode(state, prompt, job.add_special_tokens)
        prompts.append(truncate(ids, body, room_tokens=room_tokens))
    return dataclasses.replace(job, prompts=prompts)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts as a list of texts or of token ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


class _Choice:
    """One output on its way: its prefix of the stream's events and the offset of its tokens in the text."""

    def __init__(self, index: int, logprobs: ClassicLogprobs | None) -> None:
        self.index = index
        self.logprobs = logprobs
        self.started = False


class CompletionWriter:
    """Turns chunks into pieces of the answer, and pieces into events or one document."""

    def __init__(self, state: ServeState, body: CompletionRequest, job: GenerationJob) -> None:
        self._state = state
        self._body = body
        self._job = job
        self._tally = UsageTally()
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        # Models without a tokenizer take and give token ids; they are asked for text only where text is wanted.
        scored = body.logprobs is not None
        hidden: frozenset[int] = frozenset()
        if scored and job.sampling.skip_special_tokens:
            hidden = state.engine.tokenizer.special_ids
        self._choices = [
            _Choice(
                index,
                None if not scored else ClassicLogprobs(as_ids=self._as_ids, hidden_ids=hidden),
            )
            for index in range(job.sequences)
        ]
        self._head = {
            "id": job.answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.engine.model_name,
        }

    async def collect(self) -> dict[str, Any]:
        """Run to the end and return the answer."""
        texts: list[list[str]] = [[] for _ in self._choices]
        documents: list[dict[str, Any]] = [{"index": choice.index, "text": ""} for choice in self._choices]
        for document in documents:
            document.update(logprobs=None, finish_reason=None, stop_reason=None)
        async with aclosing(run_job(self._state, self._job, self._tally)) as chunks:
            async for index, chunk in chunks:
                for piece in self._pieces(index, chunk):
                    texts[index].append(piece.pop("text"))
                    _fold(documents[index], piece)
        for document, parts in zip(documents, texts, strict=True):
            document["text"] = "".join(parts)
        return {**self._head, "choices": documents, "usage": self._tally.document()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield one event for each piece, then the usage if asked for."""
        chunks: Chunks
        plain = not (self._usage_always or self._body.logprobs is not None or self._body.return_token_ids)
        before = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        after = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null}\n\n' if self._usage_at_end else b"}\n\n")
        prefixes = [b'%s%d,"text":' % (before, choice.index) for choice in self._choices]
        async with aclosing(run_job(self._state, self._job, self._tally)) as chunks:
            async for index, chunk in chunks:
                # The common case, a token of text and nothing else, is three byte strings joined.
                if plain and chunk.finish_reason is None and self._choices[index].started:
                    if chunk.text:
                        yield prefixes[index] + _encode(chunk.text) + after
                    continue
                for piece in self._pieces(index, chunk):
                    yield self._event({"index": index, **piece})
        if self._usage_at_end:
            document = {**self._head, "choices": [], "usage": self._tally.document()}
            yield b"data: " + _encode(document) + b"\n\n"

    def _event(self, choice: dict[str, Any]) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage_always:
            document["usage"] = self._tally.document()
        elif self._usage_at_end:
            document["usage"] = None
        return b"data: " + _encode(document) + b"\n\n"

    def _pieces(self, index: int, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return what a chunk adds to its choice: the prompt (once), text, the end; each maybe."""
        choice = self._choices[index]
        pieces: list[dict[str, Any]] = []
        if not choice.started:
            choice.started = True
            first = self._first_piece(choice, chunk)
            if first is not None:
                pieces.append(first)
        logprobs = None
        if choice.logprobs is not None and chunk.logprobs:
            logprobs = choice.logprobs.add(chunk.logprobs, top=self._body.logprobs or 0)
        with_ids = bool(self._body.return_token_ids and chunk.token_ids)
        if chunk.text or logprobs is not None or with_ids:
            piece: dict[str, Any] = {"text": chunk.text, "logprobs": logprobs, "finish_reason": None}
            if with_ids:
                piece["token_ids"] = list(chunk.token_ids)
            pieces.append(piece)
        if chunk.finish_reason is not None:
            pieces.append(
                {"text": "", "logprobs": None, "finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
            )
        return pieces

    def _first_piece(self, choice: _Choice, chunk: OutputChunk) -> dict[str, Any] | None:
        """Return what comes before the output: the echoed prompt, its log-probabilities, its token ids."""
        body = self._body
        piece: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None}
        if body.echo:
            piece["text"] = self._prompt_text(choice.index, chunk.prompt_token_ids)
            if choice.logprobs is not None:
                invariant(chunk.prompt_logprobs is not None, "the engine left out the prompt's log-probabilities")
                tokenizer = self._state.engine.tokenizer
                piece["logprobs"] = choice.logprobs.add(
                    chunk.prompt_logprobs or [],
                    top=body.logprobs or 0,
                    unscored=[
                        (i, tokenizer.token_bytes(i), tokenizer.token_text(i)) for i in chunk.prompt_token_ids[:1]
                    ],
                )
        if body.prompt_logprobs is not None and chunk.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_entries(
                chunk.prompt_logprobs, top=body.prompt_logprobs, as_ids=self._as_ids
            )
        if body.return_token_ids:
            piece["prompt_token_ids"] = list(chunk.prompt_token_ids)
        return piece if body.echo or len(piece) > 3 else None

    def _prompt_text(self, index: int, prompt_token_ids: list[int]) -> str:
        prompt = self._job.prompts[index // self._job.sampling.n]
        if isinstance(prompt, str):
            return prompt
        text: str = self._state.engine.tokenizer.decode(prompt_token_ids, self._job.sampling.skip_special_tokens)
        return text


def _fold(document: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece to the plain answer: lists grow, the rest is replaced."""
    for name, value in piece.items():
        present = document.get(name)
        if value is None:
            document.setdefault(name, None)
        elif name == "logprobs" and present is not None:
            for key, items in value.items():
                present[key].extend(items)
        elif name == "token_ids" and present is not None:
            present.extend(value)
        else:
            document[name] = value

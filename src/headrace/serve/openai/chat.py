"""``POST /v1/chat/completions``: messages in, the assistant's answer out.

A streamed answer: per choice one event with the role, then text, then one with an empty delta and the finish reason.
Must not know the engine's inside.
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

from headrace.base.errors import RequestError
from headrace.serve.context import ServeState, state_of
from headrace.serve.generation import (
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
from headrace.serve.openai.chat_schema import ChatCompletionAnswer, ChatCompletionChunk, ChatCompletionRequest
from headrace.serve.openai.documented import documents
from headrace.serve.openai.logprobs import chat_logprobs, prompt_entries
from headrace.serve.openai.prompting import render_prompt
from headrace.serve.openai.sampling import chat_max_tokens, sampling_params
from headrace.serve.openai.tokens import encode
from headrace.serve.stream import EventStream
from headrace.serve.tenants import salt_of, tenant_of
from headrace.serve.time_limit import time_limit
from headrace.types.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from headrace.engine.request_output import OutputChunk

router = APIRouter(tags=["OpenAI"])
_encode = msgspec.json.Encoder().encode


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionAnswer,
    **documents(ChatCompletionRequest, stream=ChatCompletionChunk),
)
async def chat_completions(
    request: Request,
    body: Annotated[ChatCompletionRequest, Depends(body_of(ChatCompletionRequest))],
    state: Annotated[ServeState, Depends(state_of)],
) -> Response:
    """Answer a conversation."""
    state.require_ready()
    state.require_model(body.model)
    body.check_refused()
    check_stream_options(body)
    job = await _job(state, body, request)
    writer = ChatWriter(state, body, job)
    if body.stream:
        return EventStream(state, writer.events(), job.limit)
    async with Interruptible(state, request.receive, job.limit):
        return json_answer(await writer.collect())


async def _job(state: ServeState, body: ChatCompletionRequest, request: Request) -> GenerationJob:
    sampling = sampling_params(
        body,
        state.engine.defaults,
        max_tokens=chat_max_tokens(body, body.max_completion_tokens, state.engine.defaults),
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    job = GenerationJob(
        answer_id=answer_id("chatcmpl", body, request),
        prompts=[await render_prompt(state, body, body.messages)],
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=salt_of(state.config, request, body.cache_salt),
        tenant=tenant_of(request),
        limit=time_limit(body, state.config.request_timeout_s),
        # The template writes the special tokens itself.
        add_special_tokens=bool(body.add_special_tokens),
    )
    check_sequences(job)
    if body.truncate_prompt_tokens is None:
        return job
    ids = await encode(state, str(job.prompts[0]), job.add_special_tokens)
    room_tokens = state.engine.max_model_len - (sampling.max_tokens or 1)
    return dataclasses.replace(job, prompts=[truncate(ids, body, room_tokens=room_tokens)])


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """Return the number of alternatives, or None without log-probabilities."""
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}", param="top_logprobs")
    if not body.logprobs:
        if top:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return None
    return top or 0


class ChatWriter:
    """Turns chunks into pieces of the answer, and pieces into events or one document."""

    def __init__(self, state: ServeState, body: ChatCompletionRequest, job: GenerationJob) -> None:
        self._state = state
        self._body = body
        self._job = job
        self._tally = UsageTally()
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._started = [False] * job.sequences
        self._head: dict[str, Any] = {
            "id": job.answer_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": state.engine.model_name,
        }
        self._echoed = _last_text(body) if body.echo else ""

    async def collect(self) -> dict[str, Any]:
        """Run to the end and return the answer."""
        texts = [[self._echoed] for _ in self._started]
        choices: list[dict[str, Any]] = [
            {"index": index, "message": None, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for index in range(self._job.sequences)
        ]
        extras: dict[str, Any] = {}
        async with aclosing(run_job(self._state, self._job, self._tally)) as chunks:
            async for index, chunk in chunks:
                choice = choices[index]
                if not self._started[index]:
                    self._started[index] = True
                    extras.update(self._prompt_fields(chunk))
                texts[index].append(chunk.text)
                self._fold(choice, chunk)
        for choice, parts in zip(choices, texts, strict=True):
            choice["message"] = {"role": "assistant", "content": "".join(parts), "refusal": None}
        return {**self._head, "choices": choices, "usage": self._tally.document(), **extras}

    def _fold(self, choice: dict[str, Any], chunk: OutputChunk) -> None:
        """Add log-probabilities, token ids and the end to a plain choice."""
        if self._body.logprobs and chunk.logprobs:
            logprobs = chat_logprobs(chunk.logprobs, top=self._body.top_logprobs or 0, as_ids=self._as_ids)
            if choice["logprobs"] is None:
                choice["logprobs"] = logprobs
            else:
                choice["logprobs"]["content"].extend(logprobs["content"])
        if self._body.return_token_ids:
            choice.setdefault("token_ids", []).extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            choice["finish_reason"] = chunk.finish_reason
            choice["stop_reason"] = chunk.stop_reason

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer, then the usage if asked for."""
        plain = not (self._usage_always or self._body.logprobs or self._body.return_token_ids)
        before = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        after = b'},"logprobs":null,"finish_reason":null}]'
        after += b',"usage":null}\n\n' if self._usage_at_end else b"}\n\n"
        prefixes = [b'%s%d,"delta":{"content":' % (before, index) for index in range(self._job.sequences)]
        async with aclosing(run_job(self._state, self._job, self._tally)) as chunks:
            async for index, chunk in chunks:
                if not self._started[index]:
                    self._started[index] = True
                    yield self._event(index, {"role": "assistant", "content": ""}, **self._prompt_fields(chunk))
                    if self._echoed:
                        yield self._event(index, {"content": self._echoed})
                if plain:
                    # The common case, a token of text and nothing else, is three byte strings joined.
                    if chunk.text:
                        yield prefixes[index] + _encode(chunk.text) + after
                else:
                    event = self._rich_event(index, chunk)
                    if event is not None:
                        yield event
                if chunk.finish_reason is not None:
                    yield self._event(index, {}, finish_reason=chunk.finish_reason, stop_reason=chunk.stop_reason)
        if self._usage_at_end:
            document = {**self._head, "choices": [], "usage": self._tally.document()}
            yield b"data: " + _encode(document) + b"\n\n"

    def _rich_event(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the event of a chunk with log-probabilities, token ids or usage; None if it adds nothing."""
        fields: dict[str, Any] = {}
        if self._body.logprobs and chunk.logprobs:
            fields["logprobs"] = chat_logprobs(chunk.logprobs, top=self._body.top_logprobs or 0, as_ids=self._as_ids)
        if self._body.return_token_ids and chunk.token_ids:
            fields["token_ids"] = list(chunk.token_ids)
        if not chunk.text and not fields:
            return None
        return self._event(index, {"content": chunk.text}, **fields)

    def _event(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        """Encode one event; fields of the choice and of the document are told apart by name."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        document: dict[str, Any] = {**self._head, "choices": [choice]}
        for name, value in fields.items():
            (document if name.startswith("prompt_") else choice)[name] = value
        if self._usage_always:
            document["usage"] = self._tally.document()
        elif self._usage_at_end:
            document["usage"] = None
        return b"data: " + _encode(document) + b"\n\n"

    def _prompt_fields(self, chunk: OutputChunk) -> dict[str, Any]:
        """Return what was asked for about the prompt."""
        fields: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None and chunk.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(
                chunk.prompt_logprobs, top=self._body.prompt_logprobs, as_ids=self._as_ids
            )
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(chunk.prompt_token_ids)
        return fields


def _last_text(body: ChatCompletionRequest) -> str:
    """Return the text of the last message if it is the assistant's."""
    last = body.messages[-1]
    if last.role != "assistant":
        return ""
    content = last.to_template(len(body.messages) - 1)["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

"""Where the answers of ``chat`` and ``complete`` come from: an engine of this command, or a running server.

Both give the text piece by piece. Must not read from or write to the terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.base.errors import ConfigError, HeadraceError
from headrace.bench.http_client import Client, HttpAnswer, ServerAnswerError, error_text, parse_endpoint
from headrace.bench.serve import first_model

if TYPE_CHECKING:
    from headrace.config import EngineConfig

Message = dict[str, str]


class Talker(Protocol):
    """Answers chats and continues texts."""

    async def start(self) -> None:
        """Get ready to answer.

        Raises:
            HeadraceError: it cannot.
        """
        ...

    def chat(self, messages: Sequence[Message], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Return the answer to a conversation, piece by piece. Closing the generator ends the request."""
        ...

    def complete(self, text: str, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Return the continuation of a text, piece by piece."""
        ...

    async def stop(self) -> None:
        """Let go of everything."""
        ...


class RemoteTalker:
    """A running server with OpenAI's API."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._client = Client(parse_endpoint(url, api_key))
        self._model = model

    async def start(self) -> None:
        """Ask the server for its model, if none is named; raises as `first_model`."""
        if self._model is None:
            self._model = await first_model(self._client)

    def chat(self, messages: Sequence[Message], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """As `Talker.chat`."""
        return self._pieces("/v1/chat/completions", {"messages": list(messages), **sampling})

    def complete(self, text: str, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """As `Talker.complete`."""
        return self._pieces("/v1/completions", {"prompt": text, **sampling})

    async def stop(self) -> None:
        """Close the connections."""
        self._client.close()

    async def _pieces(self, path: str, fields: dict[str, Any]) -> AsyncGenerator[str, None]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def exchange() -> HttpAnswer:
            try:
                document = {"model": self._model, "stream": True, **fields}
                return await self._client.request("POST", path, document, lambda data, _: queue.put_nowait(data))
            finally:
                queue.put_nowait(None)

        task = asyncio.create_task(exchange())
        try:
            while (data := await queue.get()) is not None:
                if data != b"[DONE]":
                    yield _text_of(data)
            (await task).require_ok(self._client.endpoint, path)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _text_of(data: bytes) -> str:
    """Return the text of one streamed event.

    Raises:
        ServerAnswerError: the event is an error.
    """
    try:
        event = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ServerAnswerError(f"the server sent an event that is not JSON: {error}") from error
    if not isinstance(event, dict) or event.get("error") is not None:
        raise ServerAnswerError(f"the server broke off: {error_text(data)}")
    pieces = []
    for choice in event.get("choices") or []:
        pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(pieces)


class LocalTalker:
    """An engine that lives as long as this command."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine: Any = None

    async def start(self) -> None:
        """Load the model; raises as the engine."""
        from headrace.engine.text_engine import TextEngine

        self._engine = TextEngine(self._config)
        await self._engine.start()

    def chat(self, messages: Sequence[Message], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """As `Talker.chat`."""
        template = self._engine.chat_template
        if template is None:
            raise ConfigError(
                "the model has no chat template: use headrace complete, or give one with --chat-template FILE"
            )
        return self._pieces(
            template.render(list(messages), add_generation_prompt=True), sampling, add_special_tokens=False
        )

    def complete(self, text: str, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        """As `Talker.complete`."""
        return self._pieces(text, sampling, add_special_tokens=True)

    async def stop(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            await self._engine.stop()

    async def _pieces(
        self, prompt: str, sampling: dict[str, Any], *, add_special_tokens: bool
    ) -> AsyncGenerator[str, None]:
        from headrace.types.sampling import SamplingParams

        fields = {"max_tokens": None, **self._engine.defaults, **sampling}
        chunks: AsyncIterator[Any] = self._engine.stream(
            prompt, SamplingParams(**fields), add_special_tokens=add_special_tokens
        )
        async with aclosing(chunks) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                yield chunk.text


async def write_answer(pieces: AsyncGenerator[str, None], write: Any) -> str:
    """Pass on an answer as it comes.

    Args:
        pieces: from a `Talker`.
        write: takes each piece.

    Returns:
        The whole text.

    Raises:
        HeadraceError: the request failed.
    """
    text = []
    async with aclosing(pieces) as stream:
        async for piece in stream:
            write(piece)
            text.append(piece)
    return "".join(text)


def is_request_error(error: HeadraceError) -> bool:
    """Return True if the conversation can go on after this error: it is about this one request."""
    return error.http_status < 500

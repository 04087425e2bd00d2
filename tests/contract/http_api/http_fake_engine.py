"""An engine with a script in place of a model: tests of the HTTP surface need no torch and take milliseconds."""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.base.errors import ContextLengthError, RequestError, TemplateError
from headrace.engine.request_output import OutputChunk, TokenEntry
from headrace.types.outputs import SchedulerStats
from headrace.types.sampling import SamplingParams
from headrace.types.wire import PhaseSeconds

BOS, EOS = 256, 257


class FakeTokenizer:
    """One token a byte, plus <bos> and <eos>."""

    vocab_tokens = 258
    bos_id = BOS
    eos_ids = (EOS,)
    special_ids = frozenset({BOS, EOS})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        shown = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids))
        return shown.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id) or bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class FakeTemplate:
    """Writes ``role: content`` lines."""

    @staticmethod
    def flat(content: str | list[dict[str, str]]) -> str:
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    def __init__(self, source: str = "") -> None:
        self.source = source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **kwargs: Any,
    ) -> str:
        if "raise_exception" in self.source or kwargs.get("fail"):
            raise TemplateError("the chat template raised: no", param="chat_template")
        text = self.source + "".join(f"{m['role']}: {self.flat(m['content'])}\n" for m in messages)
        if kwargs:
            text += f"{sorted(kwargs.items())}\n"
        if continue_final_message:
            return text[:-1]
        return text + ("assistant:" if add_generation_prompt else "")


class FakeHealth(msgspec.Struct):
    state: str = "ready"
    reason: str = ""
    restarts: int = 0
    steps: int = 7


@dataclass
class Call:
    """One call of ``stream``."""

    prompt: str | list[int]
    sampling: SamplingParams
    request_id: str | None
    priority: int
    cache_salt: str | None
    add_special_tokens: bool
    tenant: str | None = None
    timeout_s: float | None = None
    closed: threading.Event = field(default_factory=threading.Event)
    finished: bool = False


class Hold:
    """A step that waits until the stream is cancelled or `release` is called from any thread."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        await self._event.wait()

    def release(self) -> None:
        assert self.reached.wait(10)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._event.set)


Step = OutputChunk | Exception | Hold


class FakeTextEngine:
    """Streams what ``script(call)`` returns: chunks, errors to raise, events to wait for.

    The default script answers with the text of ``reply`` token by token, until ``max_tokens``.
    """

    model_name = "fake-model"
    max_model_len = 1000

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; tests share one server."""
        self.reply = "Hello, 世界 🙂!"
        self.tokenizer = FakeTokenizer()
        self.startup_tables: list[tuple[str, list[PhaseSeconds]]] = [("fake", [PhaseSeconds("nothing", 0.25)])]
        self.start_gate: asyncio.Event | None = None
        self.start_error: Exception | None = None
        self.chat_template: FakeTemplate | None = FakeTemplate()
        self.defaults: dict[str, Any] = {}
        self.fake_health = FakeHealth()
        self.fake_stats = SchedulerStats(blocks_total=10, blocks_free=4, running=2, waiting=3, prefix_query_tokens=100)
        self.calls: list[Call] = []
        self.script: Callable[[Call], list[Step]] = self.default_script
        self.stopped = False

    async def start(self) -> None:
        if self.start_gate is not None:
            self.fake_health = FakeHealth(state="starting", reason="loading weights")
            await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        self.fake_health = FakeHealth()

    async def stop(self) -> None:
        self.stopped = True

    def health(self) -> FakeHealth:
        return self.fake_health

    def stats(self) -> SchedulerStats:
        return self.fake_stats

    def compile_chat_template(self, source: str) -> FakeTemplate:
        if "{%" in source and "%}" not in source:
            raise TemplateError("the chat template does not parse", param="chat_template")
        return FakeTemplate(source)

    def prompt_ids(self, call: Call) -> list[int]:
        if isinstance(call.prompt, str):
            return self.tokenizer.encode(call.prompt, call.add_special_tokens)
        return list(call.prompt)

    def entry(self, token_id: int, top: int) -> TokenEntry:
        """The likeliest token is the one that stands there, then come its neighbours."""
        tokenizer = self.tokenizer
        ids = [(token_id + shift) % 256 for shift in range(1, top)]
        tops = [token_id, *ids][:top]
        return TokenEntry(
            token_id=token_id,
            text=tokenizer.token_text(token_id),
            bytes=tokenizer.token_bytes(token_id),
            logprob=-0.5,
            rank=1,
            top=[(i, tokenizer.token_text(i), tokenizer.token_bytes(i), -0.5 - rank) for rank, i in enumerate(tops)],
        )

    def default_script(self, call: Call) -> list[Step]:
        ids = self.prompt_ids(call)
        sampling = call.sampling
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the model takes {self.max_model_len}", param="prompt"
            )
        steps: list[Step] = []
        for index in range(sampling.n):
            text = self.reply if index == 0 else f"{self.reply}{index}"
            out = list(text.encode())[: sampling.max_tokens or 10_000]
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            for number, token_id in enumerate(out):
                last = number == len(out) - 1
                chunk = OutputChunk(
                    index=index,
                    text=decoder.decode(bytes([token_id]), last),
                    token_ids=[token_id],
                    logprobs=None if sampling.logprobs is None else [self.entry(token_id, sampling.logprobs)],
                    cached_tokens=16,
                )
                if number == 0:
                    chunk.prompt_token_ids = ids
                    if sampling.prompt_logprobs is not None:
                        chunk.prompt_logprobs = [None, *(self.entry(i, sampling.prompt_logprobs) for i in ids[1:])]
                if last:
                    chunk.finish_reason = "length" if len(out) == sampling.max_tokens else "stop"
                steps.append(chunk)
        return steps

    async def stream(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[OutputChunk, None]:
        call = Call(prompt, sampling, request_id, priority, cache_salt, add_special_tokens, tenant, timeout_s)
        self.calls.append(call)
        try:
            for step in self.script(call):
                await asyncio.sleep(0)
                if isinstance(step, Hold):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    yield step
            call.finished = True
        finally:
            call.closed.set()

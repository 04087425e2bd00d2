"""`TextEngine`: text in, chunks of text out, over a core in its own process. What the HTTP server stands on.

Loads no torch. Nothing heavier than a short tokenisation runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base.clock import SystemClock
from headrace.base.errors import ConfigError, EngineUnavailableError
from headrace.config import EngineConfig, check_rules
from headrace.engine.core_launch import DEFAULT_EXECUTOR_FACTORY, LaunchedCore, RuntimeDir, launch_core
from headrace.observe.startup import StartupTable
from headrace.types.outputs import SchedulerStats

if TYPE_CHECKING:
    from headrace.engine.client import CoreClient
    from headrace.engine.input_processor import InputProcessor, ProcessedPrompt
    from headrace.engine.request_output import OutputChunk
    from headrace.engine.text_parts import TextParts
    from headrace.text.chat import ChatTemplate
    from headrace.text.tokenizer import Tokenizer
    from headrace.types.sampling import SamplingParams
    from headrace.types.wire import PhaseSeconds


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests make progress.

    Attributes:
        state: "ready" when requests are served; "starting", "restarting", "stalled", "failed" or "stopped" else.
        reason: one sentence for people; empty when ready.
        restarts: how often the core was restarted after a crash.
        unfinished: requests under way.
        stalled_s: seconds since the last completed step while there is work, else 0.
    """

    state: str
    reason: str
    restarts: int
    unfinished: int
    stalled_s: float


class TextEngine:
    """Generates text with a model that runs in a process of its own.

    Args:
        config: the engine configuration.
        max_core_restarts: crashes of the core within ten minutes before the engine gives up.
        stall_limit_s: seconds without a completed step, while there is work, after which `health` says "stalled".
        executor_factory: ``module:function`` for the core; tests put a fake device here.

    Raises:
        ConfigError: a combination of options that cannot work.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_core_restarts: int = 5,
        stall_limit_s: float = 60.0,
        executor_factory: str = DEFAULT_EXECUTOR_FACTORY,
    ) -> None:
        check_rules(config)
        self._config = config
        self._max_core_restarts = max_core_restarts
        self._stall_limit_s = stall_limit_s
        self._executor_factory = executor_factory
        self._clock = SystemClock()
        self._startup = StartupTable("front end")
        self._early: tuple[RuntimeDir, LaunchedCore] | None = None
        self._client: CoreClient | None = None
        self._parts: TextParts | None = None
        self._inputs: InputProcessor | None = None
        self._numbers = itertools.count()

    def launch(self) -> None:
        """Start the core process now and return at once, so that it loads while the caller imports and binds.

        `start` does it if nobody did. Needs no event loop.
        """
        if self._early is None and self._client is None:
            runtime_dir = RuntimeDir()
            self._early = (
                runtime_dir,
                launch_core(self._config, runtime_dir.path, executor_factory=self._executor_factory),
            )
            self._startup.mark("until the core's launch")

    async def start(self) -> None:
        """Load the text side and wait until the core is ready.

        Raises:
            HeadraceError: the model cannot be served; nothing is left behind.
        """
        self.launch()
        from headrace.engine.client import CoreClient
        from headrace.engine.input_processor import InputProcessor
        from headrace.engine.text_parts import load_text_parts

        early, self._early = self._early, None
        if early is None:
            raise ConfigError("the engine is started already")
        client = self._client = CoreClient(
            self._config,
            max_restarts=self._max_core_restarts,
            runtime_dir=early[0],
            launched=early[1],
            executor_factory=self._executor_factory,
        )
        core = asyncio.create_task(client.start(), name="core-start")
        self._startup.mark("imports and sockets")
        try:
            parts = await asyncio.to_thread(load_text_parts, self._config.model)
            self._startup.mark("tokenizer and template")
            ready = await core
            self._startup.mark("wait for the core")
            seed = self._config.cache.prefix_hash_seed
            inputs = InputProcessor(parts.tokenizer, ready, parts.eos_token_ids, hash_seed=seed)
            await asyncio.to_thread(inputs.prepare)
        except BaseException:
            core.cancel()
            await asyncio.gather(core, return_exceptions=True)
            await client.stop()
            raise
        self._parts, self._inputs = parts, inputs
        self._startup.mark("vocabulary")

    async def stop(self) -> None:
        """End the core and remove every trace; running requests fail with `EngineUnavailableError`."""
        early, self._early = self._early, None
        if early is not None:
            await asyncio.to_thread(early[1].destroy)
            early[0].close()
        if self._client is not None:
            await self._client.stop()

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        return self._config.model.served_model_name or self._config.model.model

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        return self._require_client().ready.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model has none.
        """
        tokenizer = self._require_parts().tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self._config.model.model}: the model has no tokenizer", param="tokenizer")
        return tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, or None."""
        return self._require_parts().chat_template

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults of the model, by field name."""
        return self._require_parts().defaults

    @property
    def startup_tables(self) -> list[tuple[str, list[PhaseSeconds]]]:
        """Rows of the start-up table for `headrace.observe.startup.print_startup`: each section adds up by itself."""
        core = self._client.ready.startup if self._client is not None else []
        return [(self._startup.title, self._startup.rows), ("engine core (at the same time)", core)]

    def mark_startup(self, phase: str) -> None:
        """Add a row of the caller's own to the front end's start-up table: the time since the last row."""
        self._startup.mark(phase)

    def compile_chat_template(self, source: str) -> ChatTemplate:
        """Return a template that a request brings along.

        Raises:
            TemplateError: it does not compile.
        """
        return self._require_parts().compile_chat_template(source)

    def stats(self) -> SchedulerStats:
        """Return the newest numbers of the scheduler; totals go on over restarts of the core."""
        return self._client.stats() if self._client is not None else SchedulerStats()

    def health(self) -> Health:
        """Return whether requests make progress; costs nothing."""
        client = self._client
        if client is None or (self._inputs is None and client.state == "ready"):
            return Health("starting", "the model is loading", 0, 0, 0.0)
        state: str = client.state
        stalled_s = client.stalled_s() if state == "ready" else 0.0
        reason = {"ready": "", "starting": "the model is loading", "stopped": "the engine is stopped"}.get(state)
        if state == "ready" and stalled_s > self._stall_limit_s:
            state, reason = "stalled", f"no step was completed for {stalled_s:.0f} s, though there is work"
        elif state == "restarting":
            reason = "the engine core crashed and is being restarted; unfinished requests will go on"
        elif client.failure is not None:
            reason = client.failure.message
        return Health(state, reason or "", client.restarts, client.unfinished, stalled_s)

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[OutputChunk]:
        """Generate, chunk by chunk; closing the iterator aborts the request.

        Args:
            prompt: text or token ids.
            sampling: parameters; chunks of the ``n`` outputs interleave.
            request_id: for the logs; made unique here.
            priority: smaller runs earlier (priority policy only).
            cache_salt: separates prefix-cache entries of different tenants.
            add_special_tokens: let the tokenizer add what the model expects at the beginning of a text.
            tenant: whose quota the request counts towards.
            timeout_s: the request ends with an error so many seconds from now.

        Yields:
            Chunks; the last one of each index has a ``finish_reason``.

        Raises:
            HeadraceError: refused (before the first chunk), or failed.
        """
        from headrace.engine.output_processor import SequenceOutput

        client = self._require_client()
        arrival_s = self._clock.now_s()
        processed = await self._process(
            prompt,
            sampling,
            request_id=f"{request_id or 'request'}-{next(self._numbers)}-{secrets.token_hex(4)}",
            arrival_s=arrival_s,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            add_special_tokens=add_special_tokens,
        )
        tokenizer = self._require_parts().tokenizer
        outputs = {
            request.request_id: SequenceOutput(request, index, tokenizer)
            for index, request in enumerate(processed.requests)
        }
        stream = client.open_stream(processed.requests)
        try:
            async for delta in stream:
                output = outputs[delta.request_id]
                chunk = output.push(delta)
                if output.stopped_here:
                    client.abort(delta.request_id)
                if chunk is not None:
                    yield chunk
        finally:
            stream.close()

    async def _process(self, prompt: str | Sequence[int], sampling: SamplingParams, **facts: Any) -> ProcessedPrompt:
        if self._inputs is None:
            raise EngineUnavailableError("the model is still loading")
        if self._inputs.is_quick(prompt, sampling):
            return self._inputs.process(prompt, sampling, **facts)
        return await asyncio.to_thread(self._inputs.process, prompt, sampling, **facts)

    def _require_client(self) -> CoreClient:
        if self._client is None:
            raise EngineUnavailableError("the engine is not started")
        return self._client

    def _require_parts(self) -> TextParts:
        if self._parts is None:
            raise EngineUnavailableError("the model is still loading")
        return self._parts

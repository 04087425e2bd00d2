"""The offline class: `LLM` runs a model in this process, no sockets and no asyncio, and answers in input order.

Input and output processing are those of the server, so the same prompt gives the same text. Must not import torch at
module level.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.base.clock import SystemClock
from headrace.base.errors import ConfigError, EngineUnavailableError, HeadraceError, RequestError
from headrace.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    check_rules,
)
from headrace.config.flags import check_section
from headrace.engine.core import EngineCore
from headrace.engine.core_launch import RuntimeDir
from headrace.engine.executors import make_executor
from headrace.engine.input_processor import InputProcessor, ProcessedPrompt
from headrace.engine.offline_batch import OfflineBatch, deferred_interrupt
from headrace.engine.offline_prompts import (
    Conversation,
    Prompt,
    as_conversations,
    as_prompts,
    sampling_for,
    text_or_ids,
)
from headrace.engine.request_output import RequestOutput
from headrace.engine.text_parts import load_text_parts
from headrace.types.events import ResetPrefixCache
from headrace.types.outputs import SchedulerStats
from headrace.types.sampling import SamplingParams
from headrace.types.wire import PhaseSeconds

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

_SECTIONS = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}


class LLM:
    """A model for offline use.

    Example:
        ``with LLM() as llm: print(llm.generate("The capital of France is")[0].outputs[0].text)``

    Args:
        model: directory, .gguf file, hub name ORG/NAME, or "default" (SmolLM2-135M-Instruct).
        options: engine options by field name, as in `headrace.config` (``max_model_len=1024``, ``dtype="float32"``).

    Raises:
        ConfigError: an unknown option, a combination that cannot work, or a model that cannot be loaded.
    """

    def __init__(self, model: str = "default", **options: Any) -> None:
        config = engine_config(model, options)
        self._runtime_dir = RuntimeDir() if config.parallel.tensor_parallel_size > 1 else None
        self._core: EngineCore | None = None
        self._clock = SystemClock()
        self._numbers = itertools.count()
        self._fault: HeadraceError | None = None
        self._config = config
        try:
            self._parts = load_text_parts(config.model)
            directory = self._runtime_dir.path if self._runtime_dir is not None else None
            executor = make_executor(config, directory, self._parts.files)
            self._core = EngineCore(config, executor, self._clock)
            self._ready = self._core.start()
        except BaseException:
            self.close()
            raise
        self._inputs = InputProcessor(
            self._parts.tokenizer, self._ready, self._parts.eos_token_ids, hash_seed=config.cache.prefix_hash_seed
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if it has none."""
        return self._parts.tokenizer

    @property
    def vocab_tokens(self) -> int:
        """Number of token ids that the model knows."""
        return self._ready.vocab_tokens

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        return self._ready.max_model_len

    @property
    def startup(self) -> list[PhaseSeconds]:
        """Where the time of loading went."""
        return list(self._ready.startup)

    def stats(self) -> SchedulerStats:
        """Return the scheduler's numbers."""
        return self._require_core().stats()

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """Return sampling parameters from the model's own defaults, with some fields changed."""
        return SamplingParams(**{**self._parts.defaults, **changes})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or a list: text, token ids, or ``{"prompt_token_ids": [...]}``.
            sampling_params: for all prompts, or one for each; the model's defaults if not given.
            use_tqdm: show a progress bar on standard error.
            priority: one for each prompt; smaller runs earlier (priority policy only).
            timeout_s: seconds that every prompt has, from now on, waiting included; None is no limit.

        Returns:
            Results in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing has run then. The message names the prompt.
            RequestTimeoutError: a prompt was not done in time.
            HeadraceError: the engine failed a request.
        """
        listed = as_prompts(prompts)
        sampling = sampling_for(listed, sampling_params, self.default_sampling)
        return self._run(listed, sampling, use_tqdm, priority, True, timeout_s)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: one conversation (a list of ``{"role": ..., "content": ...}``) or a list of them.
            sampling_params: for all conversations, or one for each; the model's defaults if not given.
            use_tqdm: show a progress bar on standard error.
            chat_template: Jinja source in place of the model's own.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: let the model go on with the last message.
            tools: passed to the template.
            chat_template_kwargs: further variables of the template.
            timeout_s: as in `generate`.

        Returns:
            Results in the order of the conversations.

        Raises:
            RequestError: no template, a template that refuses the messages, or as `generate`.
        """
        parts = self._parts
        template = parts.compile_chat_template(chat_template) if chat_template else parts.require_chat_template()
        conversations = as_conversations(messages)
        texts: list[Prompt] = [
            template.render(
                [dict(message) for message in conversation],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=[dict(tool) for tool in tools] if tools else None,
                **dict(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        # The template has put the special tokens in already.
        sampling = sampling_for(texts, sampling_params, self.default_sampling)
        return self._run(texts, sampling, use_tqdm, None, False, timeout_s)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV blocks."""
        core = self._require_core()
        core.post(ResetPrefixCache())
        core.step()

    def close(self) -> None:
        """Release the model and its memory. Safe to call twice."""
        core, self._core = self._core, None
        if core is not None:
            core.close()
        if self._runtime_dir is not None:
            self._runtime_dir.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        show_progress: bool,
        priority: Sequence[int] | None,
        add_special_tokens: bool,
        timeout_s: float | None,
    ) -> list[RequestOutput]:
        core = self._require_core()
        if timeout_s is not None and not timeout_s > 0.0:
            raise RequestError(f"timeout_s must be above 0, got {timeout_s:g}", param="timeout_s")
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(priority)} priorities", param="priority")
        arrival_s = self._clock.now_s()
        facts: dict[str, Any] = {
            "arrival_s": arrival_s,
            "deadline_s": None if timeout_s is None else arrival_s + timeout_s,
            "add_special_tokens": add_special_tokens,
        }
        processed = [
            self._process(number, prompt, parameters, priority=priority[number] if priority else 0, **facts)
            for number, (prompt, parameters) in enumerate(zip(prompts, sampling, strict=True))
        ]
        batch = OfflineBatch(core, processed, self._parts.tokenizer, self._config.scheduler)
        with _progress(len(processed), show_progress) as advance, deferred_interrupt() as check:
            try:
                while batch.unfinished:
                    check()
                    for _ in range(batch.step()):
                        advance()
            except BaseException as error:
                self._recover(batch, error)
                raise
        return batch.results

    def _process(self, number: int, prompt: Prompt, sampling: SamplingParams, **facts: Any) -> ProcessedPrompt:
        try:
            content, salt = text_or_ids(prompt)
            return self._inputs.process(
                content, sampling, request_id=f"offline-{next(self._numbers)}", cache_salt=salt, **facts
            )
        except RequestError as error:
            raise type(error)(f"prompt {number}: {error.message}", param=error.param) from error

    def _recover(self, batch: OfflineBatch, error: BaseException) -> None:
        """Leave a usable engine after an interruption or a failed request; a broken device leaves none."""
        try:
            batch.abort()
        except Exception as second:
            self._fault = EngineUnavailableError(f"the engine failed and must be made anew: {error or second}")

    def _require_core(self) -> EngineCore:
        if self._fault is not None:
            raise self._fault
        if self._core is None:
            raise EngineUnavailableError("this LLM is closed")
        return self._core


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration for engine options given by field name.

    Raises:
        ConfigError: an unknown option (with the nearest known name), a value out of range, or a refused combination.
    """
    owners = {
        field.name: name
        for name, section in _SECTIONS.items()
        for field in dataclasses.fields(section)
        if field.name != "model"
    }
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    values["model"]["model"] = str(model)
    for name, value in options.items():
        if name not in owners:
            near = difflib.get_close_matches(name, owners, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown engine option {name!r}{hint}", param=name)
        values[owners[name]][name] = str(value) if isinstance(value, Path) else value
    config = EngineConfig(
        model=check_section(ModelConfig(**values["model"])),
        cache=check_section(CacheConfig(**values["cache"])),
        scheduler=check_section(SchedulerConfig(**values["scheduler"])),
        parallel=check_section(ParallelConfig(**values["parallel"])),
    )
    check_rules(config)
    return config


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    """Yield a function that advances the progress bar by one prompt."""
    if not show or total == 0:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)

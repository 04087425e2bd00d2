"""One call of the offline class: its requests in the core, its results, and Ctrl-C between steps.

Must not know sockets or asyncio, nor where prompts come from.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from headrace.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.input_processor import ProcessedPrompt
from headrace.engine.output_processor import SequenceOutput
from headrace.engine.request_output import CompletionOutput, OutputChunk, RequestOutput
from headrace.types.events import AbortRequest, AddRequest

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class OfflineBatch:
    """The requests of one call, fed to the core no faster than its queue takes them.

    Args:
        core: steps in the caller's thread.
        prompts: checked prompts.
        tokenizer: the model's, or None.
        limits: queue and batch size of the core.

    Attributes:
        results: one for each prompt, in order; complete once `unfinished` is False.
    """

    def __init__(
        self, core: EngineCore, prompts: Sequence[ProcessedPrompt], tokenizer: Tokenizer | None, limits: SchedulerConfig
    ) -> None:
        self._core = core
        self._in_core_max = min(limits.max_queue, 2 * limits.max_num_seqs)
        self._waiting = deque(
            (number, index) for number, prompt in enumerate(prompts) for index in range(len(prompt.requests))
        )
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._running: dict[str, tuple[int, SequenceOutput]] = {}
        self.results = [
            RequestOutput(
                request_id=prompt.requests[0].request_id.partition(":")[0],
                prompt=prompt.text,
                prompt_token_ids=prompt.token_ids,
                outputs=[CompletionOutput(index) for index in range(len(prompt.requests))],
            )
            for prompt in prompts
        ]

    @property
    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return bool(self._waiting or self._running)

    def step(self) -> int:
        """Feed and step the core once; return how many prompts were completed."""
        while self._waiting and len(self._running) < self._in_core_max:
            number, index = self._waiting.popleft()
            request = self._prompts[number].requests[index]
            self._running[request.request_id] = number, SequenceOutput(request, index, self._tokenizer)
            self._core.post(AddRequest(request))
        completed = 0
        for delta in self._core.step().each():
            entry = self._running.get(delta.request_id)
            if entry is None:
                continue
            number, output = entry
            chunk = output.push(delta)
            if output.stopped_here:
                self._core.post(AbortRequest(delta.request_id))
            if output.finished:
                del self._running[delta.request_id]
            completed += self._add(number, chunk)
        return completed

    def abort(self) -> None:
        """End everything that runs and let the core free it."""
        self._waiting.clear()
        for request_id in list(self._running):
            self._core.post(AbortRequest(self._running.pop(request_id)[1].request_id))
        while self._core.has_work:
            self._core.step()

    def _add(self, number: int, chunk: OutputChunk | None) -> int:
        if chunk is None:
            return 0
        result = self.results[number]
        result.add(chunk)
        return int(chunk.finish_reason is not None and result.finished)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C take effect between steps, where the engine is consistent; a second Ctrl-C takes effect at once.

    Yields a function that raises `KeyboardInterrupt` if Ctrl-C was pressed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pressed = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield lambda: None  # somebody else handles Ctrl-C
        return
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)

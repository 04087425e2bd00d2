"""From a sequence's deltas to chunks of text: detokenisation, stop strings, log-probability entries.

Shared by the server and the offline class. Tokens after the one that completed a stop string reach neither text, nor
log-probabilities, nor usage. Must not know sockets or asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.errors import HeadraceError, InvariantError
from headrace.engine.request_output import OutputChunk, TokenEntry
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.types.error_records import error_of
from headrace.types.outputs import FinishReason, RequestDelta
from headrace.types.requests import EngineRequest
from headrace.types.results import TokenLogprobs

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class SequenceOutput:
    """Output state of one sequence.

    Args:
        request: the engine request.
        index: which of the n sequences.
        tokenizer: the model's, or None: then there is no text.

    Attributes:
        finished: True once the last chunk has been made.
        stopped_here: True if a stop string ended it, so that the core has to be told.
        output_tokens: tokens handed out so far.
    """

    def __init__(self, request: EngineRequest, index: int, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.index = index
        self.finished = False
        self.stopped_here = False
        self.output_tokens = 0
        self._request = request
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._detokenizer = None
        if sampling.detokenize and tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, sampling.skip_special_tokens
            )
        self._stop = StopMatcher(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        self._prompt_entries: list[TokenEntry | None] = [None]
        self._cached_tokens: int | None = None
        self._queued_s: float | None = None
        self._first = True

    def push(self, delta: RequestDelta) -> OutputChunk | None:
        """Take a delta.

        Returns:
            A chunk, or None if there is nothing to hand out yet.

        Raises:
            HeadraceError: the engine ended this request with an error.
        """
        if self.finished:
            return None
        if delta.finish_reason is FinishReason.ERROR:
            self.finished = True
            raise error_of(delta.error) if delta.error is not None else HeadraceError("the engine gave no cause")
        if delta.prompt_logprobs:
            self._prompt_entries.extend(self._entry(entry) for entry in delta.prompt_logprobs)
        if delta.first_scheduled_s is not None and self._first:
            self._queued_s = max(0.0, delta.first_scheduled_s - self._request.arrival_s)
        if self._cached_tokens is None and (delta.new_token_ids or delta.finish_reason is not None):
            self._cached_tokens = delta.cached_tokens
        text, used, matched = self._text_of(delta)
        chunk = OutputChunk(index=self.index, text=text, token_ids=delta.new_token_ids[:used])
        chunk.cached_tokens = self._cached_tokens or 0
        if self._sampling.logprobs is not None:
            entries = delta.logprobs or []
            if len(entries) != len(delta.new_token_ids):
                raise InvariantError(f"{len(entries)} log-probabilities for {len(delta.new_token_ids)} tokens")
            chunk.logprobs = [self._entry(entry) for entry in entries[:used]]
        self.output_tokens += used
        self._end(chunk, delta, matched)
        if not chunk.token_ids and not chunk.text and chunk.finish_reason is None:
            return None
        if self._first:
            self._first = False
            chunk.prompt_token_ids = list(self._request.prompt_token_ids)
            chunk.queued_s = self._queued_s
            if self._sampling.prompt_logprobs is not None:
                chunk.prompt_logprobs = self._prompt_entries
        return chunk

    def _end(self, chunk: OutputChunk, delta: RequestDelta, matched: str | None) -> None:
        """Set how the sequence ended, if it did."""
        if matched is not None:
            chunk.finish_reason, chunk.stop_reason = "stop", matched
            self.stopped_here = delta.finish_reason is None
        elif delta.finish_reason is FinishReason.STOP:
            chunk.finish_reason = "stop"
            if delta.stop_token_id in self._sampling.stop_token_ids:
                chunk.stop_reason = delta.stop_token_id
        elif delta.finish_reason is FinishReason.LENGTH:
            chunk.finish_reason = "length"
        elif delta.finish_reason is not None:
            chunk.finish_reason = "abort"
        self.finished = chunk.finish_reason is not None

    def _text_of(self, delta: RequestDelta) -> tuple[str, int, str | None]:
        """Return (text that may go out, how many of the new tokens count, the stop string that ended it)."""
        token_ids = delta.new_token_ids
        ended = delta.finish_reason is not None
        if self._detokenizer is None:
            return "", len(token_ids), None
        # The token that ended the output is no text, unless asked for.
        silent_last = delta.finish_reason is FinishReason.STOP and delta.stop_token_id is not None
        if silent_last and self._sampling.include_stop_str_in_output:
            silent_last = False
        spoken = token_ids[:-1] if silent_last and token_ids else token_ids
        if self._stop is None:
            text = self._detokenizer.push(spoken)
            return text + (self._detokenizer.finish() if ended else ""), len(token_ids), None
        text = ""
        for count, token_id in enumerate(spoken, start=1):
            piece, matched = self._match(self._detokenizer.push([token_id]), self.output_tokens + count)
            text += piece
            if matched is not None:
                return text, count, matched
        if not ended:
            return text, len(token_ids), None
        piece, matched = self._match(self._detokenizer.finish(), self.output_tokens + len(token_ids))
        text += piece
        return text + (self._stop.flush() if matched is None else ""), len(token_ids), matched

    def _match(self, piece: str, position: int) -> tuple[str, str | None]:
        """Look for stop strings in the text of output token number ``position``.

        The text of the first ``min_tokens`` tokens is not looked at.
        """
        if self._stop is None or position <= self._sampling.min_tokens:
            return piece, None
        return self._stop.push(piece) if piece else ("", None)

    def _entry(self, entry: TokenLogprobs) -> TokenEntry:
        top = [
            (token_id, *self._spelling(token_id), logprob)
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        text, spelled = self._spelling(entry.token_id)
        return TokenEntry(entry.token_id, text, spelled, entry.logprob, entry.rank, top)

    def _spelling(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None or token_id >= self._tokenizer.vocab_tokens:
            return "", b""  # padding rows of the embedding have no spelling
        return self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)

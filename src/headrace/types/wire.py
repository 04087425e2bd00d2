"""The wire format between front end and engine core: one version byte, then positional msgpack.

New fields only at the tail of a struct and with a default; golden vectors in ``tests/contract`` pin the order, because
a reordering would decode silently wrong. Must not know sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError, ProtocolError
from headrace.base.ids import RequestId
from headrace.types.cache_specs import KvLayout
from headrace.types.events import AbortRequest, AddRequest, ResetPrefixCache
from headrace.types.outputs import ErrorRecord, RequestDelta, SchedulerStats, StepNews, each_delta
from headrace.types.token_ids import decode_tokens, encode_tokens, token_array

WIRE_VERSION = 1


class UtilityCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A control call to the core (``stats``, ``layout``, ``crash`` under test); answered by `UtilityReply`."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish the current step and exit with status 0."""


ToCore = AddRequest | AbortRequest | ResetPrefixCache | UtilityCall | Shutdown


class PhaseSeconds(msgspec.Struct, frozen=True, array_like=True):
    """One row of the start-up table."""

    name: str
    seconds: float


class CoreReady(msgspec.Struct, frozen=True, array_like=True, tag="ready", kw_only=True):
    """The core can take requests; the facts that the front end needs.

    ``startup`` adds up to the core's wall time since its process began. ``hash_tokens`` are the tokens under one prefix
    hash, for those who compute ``EngineRequest.block_hashes``; ``capacity_tokens`` is the longest sequence whose KV
    fits. ``kv_events`` are the endpoints of live cache events and of their replays, or empty.
    """

    pid: int
    max_model_len: int
    vocab_tokens: int
    block_tokens: int
    layout: KvLayout
    startup: list[PhaseSeconds] = []
    hash_tokens: int = 0
    capacity_tokens: int = 0
    kv_events: list[str] = []


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """All news since the last message.

    Attributes:
        deltas: to be taken first.
        stats: the newest numbers.
        request_ids: requests with one new token and no other news; to be taken after ``deltas``.
        token_ids: that token, aligned with ``request_ids``.
    """

    deltas: list[RequestDelta]
    stats: SchedulerStats | None = None
    request_ids: list[RequestId] = []
    token_ids: list[int] = []

    def each(self) -> Iterator[RequestDelta]:
        """Yield all news as deltas, in order."""
        return each_delta(self.deltas, self.request_ids, self.token_ids)


def outputs_of(news: Sequence[StepNews], stats: SchedulerStats | None) -> StepOutputs:
    """Return one message with the news of several steps.

    Columns are taken after deltas, so only those of the last step can stay columns.

    Args:
        news: of the applied steps, oldest first.
        stats: the newest numbers.
    """
    if len(news) == 1:
        return StepOutputs(news[0].deltas, stats, news[0].request_ids, news[0].token_ids)
    deltas: list[RequestDelta] = []
    for item in news[:-1]:
        deltas.extend(item.each())
    if not news:
        return StepOutputs(deltas, stats)
    return StepOutputs(deltas + news[-1].deltas, stats, news[-1].request_ids, news[-1].token_ids)


class UtilityReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Answer to `UtilityCall`; ``result`` is plain data."""

    call_id: int
    result: Any = None
    error: ErrorRecord | None = None


class CoreFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The last message of a core that cannot go on, with the cause."""

    error: ErrorRecord
    traceback: str = ""


FromCore = CoreReady | StepOutputs | UtilityReply | CoreFailed

PACKED_FROM_TOKENS = 64
"""Prompts of so many tokens travel as bytes, four a token."""
_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_tokens)
_TO_CORE = msgspec.msgpack.Decoder(ToCore)
_FROM_CORE = msgspec.msgpack.Decoder(FromCore)
_PREFIX = bytes([WIRE_VERSION])
# What a decoder may raise on bytes of a stranger: msgspec's own errors, our typed errors from a struct's
# __post_init__, RecursionError on deep nesting, and ValueError/OverflowError from values out of range.
_DECODE_ERRORS = (msgspec.MsgspecError, HeadraceError, RecursionError, ValueError, OverflowError)


def encode(message: ToCore | FromCore) -> bytes:
    """Return version byte + msgpack."""
    if isinstance(message, AddRequest):
        message = _packed(message)
    return _PREFIX + _ENCODER.encode(message)


def _packed(message: AddRequest) -> AddRequest:
    prompt = message.request.prompt_token_ids
    if len(prompt) < PACKED_FROM_TOKENS or not isinstance(prompt, list):
        return message
    try:
        packed = token_array(prompt)
    except (OverflowError, TypeError):
        return message  # the core refuses it, and only it
    return AddRequest(msgspec.structs.replace(message.request, prompt_token_ids=packed))


def _body(data: bytes) -> memoryview:
    if not data or data[0] != WIRE_VERSION:
        got = data[0] if data else "nothing"
        raise ProtocolError(
            f"wire version {WIRE_VERSION} expected, got {got}: front end and core come from different versions"
        )
    return memoryview(data)[1:]


def decode_to_core(data: bytes) -> ToCore:
    """Decode a message of the front end.

    Raises:
        ProtocolError: wrong version or shape.
    """
    try:
        message: ToCore = _TO_CORE.decode(_body(data))
        if isinstance(message, AddRequest) and isinstance(message.request.prompt_token_ids, bytes):
            tokens = decode_tokens(message.request.prompt_token_ids)
            # Nobody else has seen the message yet.
            msgspec.structs.force_setattr(message.request, "prompt_token_ids", tokens)
        return message
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"message to the core: {error}") from error


def decode_from_core(data: bytes) -> FromCore:
    """Decode a message of the core.

    Raises:
        ProtocolError: wrong version or shape.
    """
    try:
        return _FROM_CORE.decode(_body(data))
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"message from the core: {error}") from error

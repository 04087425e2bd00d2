"""Publishes what changed in the prefix cache, so that a router or an index outside can mirror it and never gets lost.

Each batch carries an **epoch** (random, new with every engine start) and a **sequence** number without gaps. A
consumer that starts late, misses a batch or meets a restarted engine asks the second socket: it gets the batches it
lacks if they are still kept and of its epoch, else a **snapshot** with everything that can be hit and the sequence to
go on with. Both are served by the thread that makes the events, between two steps, so snapshot and stream fit exactly.

Must not block a step: a live subscriber that is too slow loses batches, sees the gap, and asks. Must not listen beyond
this machine unless clients prove who they are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from headrace.base.errors import AddressInUseError, ConfigError, ProtocolError
from headrace.config.engine import KvEventsConfig
from headrace.kv.events import BlockStored, KvEvent

KV_EVENTS_VERSION = 1
"""First field of every message of both sockets; a consumer refuses what it does not know."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one or more steps changed; the payload of a live message and of a replayed one.

    Attributes:
        version: `KV_EVENTS_VERSION`.
        epoch: of the engine's life.
        sequence: rises by one; the first batch of an epoch has 0.
        events: in order within each group.
    """

    version: int
    epoch: str
    sequence: int
    events: list[KvEvent]


class SyncRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a consumer asks.

    Attributes:
        version: `KV_EVENTS_VERSION`.
        epoch: of its last batch, "" if it has none.
        next_sequence: the batch it wants next.
    """

    version: int
    epoch: str = ""
    next_sequence: int = 0


class SyncReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `SyncRequest`.

    Attributes:
        version: `KV_EVENTS_VERSION`.
        epoch: of the engine's life.
        next_sequence: of the first batch after all that this reply tells.
        snapshot: True: forget everything, ``events`` is all that can be hit. False: ``events`` are those of the batches
            that were asked for, to be added.
        events: see there.
        hash_tokens: tokens under one hash.
    """

    version: int
    epoch: str
    next_sequence: int
    snapshot: bool
    events: list[KvEvent]
    hash_tokens: int


_T = TypeVar("_T", EventBatch, SyncReply, SyncRequest)
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(SyncRequest)
_BATCHES = msgspec.msgpack.Decoder(EventBatch)
_REPLIES = msgspec.msgpack.Decoder(SyncReply)
_TOPIC = b"kv"
_QUEUED_BATCHES = 100_000
_LINGER_MS = 200


def decode_batch(payload: bytes) -> EventBatch:
    """Decode the last frame of a live message.

    Raises:
        ProtocolError: of another version or shape.
    """
    return _checked(_BATCHES, payload)


def decode_reply(payload: bytes) -> SyncReply:
    """Decode the answer of the second socket.

    Raises:
        ProtocolError: of another version or shape.
    """
    return _checked(_REPLIES, payload)


def _checked(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        message = decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"KV event message: {error}") from error
    if message.version != KV_EVENTS_VERSION:
        raise ProtocolError(f"KV events of version {message.version}, expected {KV_EVENTS_VERSION}")
    return message


class KvEventPublisher:
    """Two sockets: live batches (PUB) and catching up (ROUTER). Used by one thread.

    Args:
        config: endpoints, memory, keys.
        hash_tokens: tokens under one hash, for consumers.
        snapshot: returns all that can be hit now.

    Raises:
        ConfigError: an endpoint beyond this machine without keys, a malformed one, or unreadable keys.
        AddressInUseError: somebody listens there already.
    """

    def __init__(self, config: KvEventsConfig, *, hash_tokens: int, snapshot: Callable[[], list[BlockStored]]) -> None:
        self.check(config)
        self.epoch = secrets.token_hex(8)
        self._hash_tokens = hash_tokens
        self._snapshot = snapshot
        self._sequence = 0
        self._kept: deque[tuple[int, list[KvEvent]]] = deque(maxlen=config.kv_events_kept_batches)
        self._context = zmq.Context()
        self._auth: ThreadAuthenticator | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._key = self._authenticate(config)
            self._live, self.endpoint = self._bind(zmq.PUB, config.kv_events)
            self._sync, self.sync_endpoint = self._bind(zmq.ROUTER, config.kv_events_sync)
        except BaseException:
            self.close()
            raise

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket on which consumers ask; readable when `serve` has something to do."""
        return self._sync

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send what has changed, if anything has. Never blocks.

        Args:
            events: since the last call, in order.
        """
        if not events:
            return
        kept = list(events)
        batch = EventBatch(KV_EVENTS_VERSION, self.epoch, self._sequence, kept)
        self._kept.append((self._sequence, kept))
        self._sequence += 1
        self._live.send_multipart([_TOPIC, batch.sequence.to_bytes(8, "big"), _ENCODER.encode(batch)])

    def serve(self) -> int:
        """Answer all consumers that have asked.

        Returns:
            How many were answered. A malformed question gets no answer.

        Requires: everything that has happened so far was given to `publish`.
        """
        answered = 0
        while True:
            try:
                frames = self._sync.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return answered
            try:
                reply = self._reply(_checked(_REQUESTS, frames[-1]))
            except ProtocolError:
                continue
            # A consumer that is gone or does not read must not hold up a step.
            with contextlib.suppress(zmq.Again, zmq.ZMQError):
                self._sync.send_multipart([*frames[:-1], _ENCODER.encode(reply)], zmq.NOBLOCK)
                answered += 1

    def close(self) -> None:
        """Close the sockets; safe to call twice."""
        for socket in self._sockets:
            socket.close(_LINGER_MS)
        self._sockets = []
        if self._auth is not None:
            self._auth.stop()
            self._auth = None
        self._context.term()

    def _reply(self, request: SyncRequest) -> SyncReply:
        oldest = self._kept[0][0] if self._kept else self._sequence
        known = request.epoch == self.epoch and oldest <= request.next_sequence <= self._sequence
        events: list[KvEvent] = []
        if known:
            for sequence, batch in self._kept:
                if sequence >= request.next_sequence:
                    events += batch
        else:
            events += self._snapshot()
        return SyncReply(KV_EVENTS_VERSION, self.epoch, self._sequence, not known, events, self._hash_tokens)

    @staticmethod
    def check(config: KvEventsConfig) -> None:
        """Refuse what can be seen to be wrong without opening a socket.

        Raises:
            ConfigError: an endpoint that is malformed, or that others could reach without keys.
        """
        for name, endpoint in (("kv_events", config.kv_events or ""), ("kv_events_sync", config.kv_events_sync)):
            transport, _, address = endpoint.partition("://")
            host, _, port = address.rpartition(":")
            fine = transport == "ipc" and bool(address)
            fine |= transport == "tcp" and bool(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16
            if not fine:
                raise ConfigError(
                    f"{endpoint!r} is no endpoint for KV events; for example tcp://127.0.0.1:0, or ipc:// and a path",
                    param=name,
                )
            if config.kv_events_keys is None and not _stays_here(endpoint):
                raise ConfigError(
                    f"KV events on {endpoint} could be read by anybody on the network, prompts included: use a "
                    "loopback address or ipc://, or give --kv-events-keys",
                    param="kv_events_keys",
                )

    def _authenticate(self, config: KvEventsConfig) -> tuple[bytes, bytes] | None:
        """Start to check clients' keys, if keys are configured; return the server's own (public, secret)."""
        if config.kv_events_keys is None:
            return None
        directory = Path(config.kv_events_keys)
        try:
            public, secret = zmq.auth.load_certificate(directory / "server.key_secret")
            clients = zmq.auth.load_certificates(directory / "clients")
        except (OSError, ValueError) as error:
            raise ConfigError(f"keys for KV events in {directory}: {error}", param="kv_events_keys") from error
        if secret is None or not clients:
            missing = "server.key_secret has no secret key" if secret is None else "clients/ has no *.key file"
            raise ConfigError(f"keys for KV events in {directory}: {missing}", param="kv_events_keys")
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve(domain="*", location=str(directory / "clients"))
        return public, secret

    def _bind(self, kind: int, endpoint: str | None) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_BATCHES)
        if self._key is not None:
            socket.curve_publickey, socket.curve_secretkey = self._key
            socket.curve_server = True
        try:
            socket.bind(endpoint or "")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUseError(f"KV events: {endpoint} is in use; take another", param="kv_events") from error
            raise ConfigError(
                f"KV events: {endpoint!r} is not an endpoint that can be bound ({error}); for example tcp://127.0.0.1:0",
                param="kv_events",
            ) from error
        return socket, bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


def _stays_here(endpoint: str) -> bool:
    """Return whether only this machine can reach an endpoint."""
    transport, _, address = endpoint.partition("://")
    if transport == "ipc":
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Follow the prefix cache of a running server, as a router or an index would.

    headrace serve --kv-events tcp://127.0.0.1:5557 --kv-events-sync tcp://127.0.0.1:5558
    python examples/mirror_kv_cache.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

Prints a line for each change. Needs `pyzmq` and `msgspec` only; the messages are plain positional msgpack, described in
docs/kv.md, so any language can do the same. The mirror is right from the first message on: it may start late, lose
messages, or meet a restarted server, and asks for a replay or a snapshot then.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import zmq

VERSION = 1
PATIENCE_MS = 5000


class CacheMirror:
    """The set of prefixes that can be hit on a server.

    Args:
        live: endpoint of the live batches.
        sync: endpoint where replays and snapshots are asked for.
    """

    def __init__(self, live: str, sync: str) -> None:
        self.stored: dict[tuple[int, bytes], list[Any]] = {}
        self.epoch, self.next_sequence = "", 0
        self.snapshots = 0
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(live)
        self._live.subscribe(b"kv")
        self._sync_endpoint = sync

    def follow(self, timeout_ms: int) -> int:
        """Take what has been sent, waiting for the first message at most so long; return how many were taken.

        Silence may mean that nothing has changed, or that the last message or the server was lost: the mirror asks.
        """
        taken = 0
        while self._live.poll(0 if taken else timeout_ms):
            version, epoch, sequence, events = msgspec.msgpack.decode(self._live.recv_multipart()[-1])
            if version != VERSION:
                raise ValueError(f"KV events of version {version}: this mirror reads {VERSION}")
            taken += 1
            if epoch == self.epoch and sequence < self.next_sequence:
                continue  # known already, from a replay or a snapshot
            if (epoch, sequence) == (self.epoch, self.next_sequence):
                self._take(events)
                self.next_sequence += 1
            else:
                self.resync()
        if not taken:
            self.resync()
        return taken

    def resync(self) -> None:
        """Ask for what is missing, or for everything."""
        socket = self._context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self._sync_endpoint)
            socket.send(msgspec.msgpack.encode([VERSION, self.epoch, self.next_sequence]))
            if not socket.poll(PATIENCE_MS):
                raise TimeoutError(f"no answer from {self._sync_endpoint} within {PATIENCE_MS / 1000} s")
            version, epoch, next_sequence, snapshot, events, _hash_tokens = msgspec.msgpack.decode(socket.recv())
        finally:
            socket.close()
        if version != VERSION:
            raise ValueError(f"KV events of version {version}: this mirror reads {VERSION}")
        if snapshot:
            self.stored.clear()
            self.snapshots += 1
        self._take(events)
        self.epoch, self.next_sequence = epoch, next_sequence

    def close(self) -> None:
        """Close the sockets."""
        self._live.close(0)
        self._context.term()

    def _take(self, events: list[list[Any]]) -> None:
        for tag, group, *rest in events:
            if tag == "stored":
                _kind, block_hash, *_about = rest
                self.stored[group, block_hash] = rest
            elif tag == "removed":
                self.stored.pop((group, rest[0]), None)
            elif tag == "cleared":
                self.stored = {key: value for key, value in self.stored.items() if key[0] != group}
            # Later versions may add events that this mirror need not know.


def main() -> None:
    """Mirror until interrupted."""
    if len(sys.argv) != 3:
        sys.exit("usage: mirror_kv_cache.py LIVE_ENDPOINT SYNC_ENDPOINT")
    mirror = CacheMirror(*sys.argv[1:3])
    while True:
        kinds: dict[str, int] = {}
        for (_group, _hash), (kind, *_rest) in mirror.stored.items():
            kinds[kind] = kinds.get(kind, 0) + 1
        print(f"epoch {mirror.epoch}, next batch {mirror.next_sequence}: {kinds or 'nothing cached'}", flush=True)
        before = (mirror.epoch, mirror.next_sequence)
        while (mirror.epoch, mirror.next_sequence) == before:
            try:
                mirror.follow(timeout_ms=1000)
            except TimeoutError as error:
                print(f"{error}; trying again", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)

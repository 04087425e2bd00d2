"""The publisher of cache events, and the mirror of the examples as its consumer: late, lossy, restarted, unwelcome."""

import importlib.util
import random
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.auth

from headrace.base.errors import AddressInUseError, ConfigError, ProtocolError
from headrace.base.ids import GroupId
from headrace.config import KvEventsConfig
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.observe.kv_events import KV_EVENTS_VERSION, KvEventPublisher, SyncRequest, decode_batch, decode_reply

EXAMPLE = Path(__file__).parents[3] / "examples" / "mirror_kv_cache.py"
PATIENCE_MS = 10_000


def load_example():
    spec = importlib.util.spec_from_file_location("mirror_kv_cache", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Mirror = load_example().CacheMirror


class Cache:
    """A cache that changes at random and remembers what it holds."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self.held = {}

    def change(self):
        """Return the events of one step."""
        events = []
        for _ in range(self._rng.randint(1, 5)):
            group, block_hash = GroupId(self._rng.randrange(3)), bytes([self._rng.randrange(30)])
            if self._rng.random() < 0.03:
                events.append(AllBlocksCleared(group))
                self.held = {key: event for key, event in self.held.items() if key[0] != group}
            elif (group, block_hash) in self.held:
                events.append(BlockRemoved(group, block_hash))
                del self.held[group, block_hash]
            else:
                event = BlockStored(group, "full", block_hash, None, [1, 2], 2)
                events.append(event)
                self.held[group, block_hash] = event
        return events

    def snapshot(self):
        return list(self.held.values())


class Served:
    """A publisher whose questions are answered by a thread, as the core's loop does it between steps."""

    def __init__(self, cache, **options):
        options = {"kv_events": "tcp://127.0.0.1:0"} | options
        self.publisher = KvEventPublisher(KvEventsConfig(**options), hash_tokens=2, snapshot=cache.snapshot)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self):
        while not self._end.is_set():
            if self.publisher.socket.poll(20):
                with self._lock:
                    self.publisher.serve()

    def step(self, cache):
        """Change the cache and tell of it, as one."""
        with self._lock:
            self.publisher.publish(cache.change())

    def close(self):
        self._end.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.publisher.close()

    def mirror(self):
        return Mirror(self.publisher.endpoint, self.publisher.sync_endpoint)


@pytest.fixture
def closing():
    opened = []
    yield lambda thing: opened.append(thing) or thing
    for thing in reversed(opened):
        thing.close()


def follow_until(mirror, publisher):
    while mirror.next_sequence < publisher._sequence or mirror.epoch != publisher.epoch:
        assert mirror.follow(PATIENCE_MS), "nothing comes any more"


def joined(mirror, served, cache):
    """Step until the subscription has taken: a PUB socket drops what nobody has asked for yet."""
    for _ in range(500):
        served.step(cache)
        if mirror._live.poll(20) and mirror.follow(0):
            return
    raise AssertionError("the subscription never took")


@pytest.mark.parametrize("seed", range(5))
def test_a_mirror_that_starts_late_equals_the_cache_after_every_batch(closing, seed):
    cache = Cache(seed)
    served = closing(Served(cache))
    for _ in range(50):
        served.step(cache)
    mirror = closing(served.mirror())
    joined(mirror, served, cache)
    for _ in range(200):
        served.step(cache)
    follow_until(mirror, served.publisher)
    assert mirror.stored.keys() == cache.held.keys()
    assert mirror.next_sequence == served.publisher._sequence


def test_a_gap_is_filled_by_a_replay_without_a_snapshot(closing):
    cache = Cache(7)
    served = closing(Served(cache))
    mirror = closing(served.mirror())
    mirror.resync()
    assert mirror.snapshots == 1
    # Not subscribed yet, or not in time: these are lost, and then the replay brings them.
    for _ in range(100):
        served.step(cache)
    mirror.resync()
    assert mirror.snapshots == 1
    assert mirror.stored.keys() == cache.held.keys()


def test_a_gap_older_than_what_is_kept_is_filled_by_a_snapshot(closing):
    cache = Cache(8)
    served = closing(Served(cache, kv_events_kept_batches=10))
    mirror = closing(served.mirror())
    mirror.resync()
    for _ in range(11):
        served.step(cache)
    mirror.resync()
    assert mirror.snapshots == 2
    assert mirror.stored.keys() == cache.held.keys()


def test_a_restarted_engine_is_a_new_epoch_even_if_its_numbers_go_on_where_the_old_ones_ended(closing):
    cache = Cache(9)
    served = Served(cache)
    mirror = closing(served.mirror())
    joined(mirror, served, cache)
    endpoints = {"kv_events": served.publisher.endpoint, "kv_events_sync": served.publisher.sync_endpoint}
    served.close()
    fresh = Cache(10)
    again = closing(Served(fresh, **endpoints))
    for _ in range(mirror.next_sequence):
        again.step(fresh)
    joined(mirror, again, fresh)
    follow_until(mirror, again.publisher)
    assert mirror.snapshots == 2
    assert mirror.stored.keys() == fresh.held.keys()


def test_no_events_take_no_sequence_number(closing):
    publisher = closing(KvEventPublisher(KvEventsConfig(kv_events="tcp://127.0.0.1:0"), hash_tokens=2, snapshot=list))
    publisher.publish([])
    assert publisher._reply(SyncRequest(KV_EVENTS_VERSION)).next_sequence == 0


def test_a_malformed_question_gets_no_answer_and_the_next_one_does(closing):
    served = closing(Served(Cache(1)))
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.connect(served.publisher.sync_endpoint)
    for junk in (b"", b"\xc1", b"\x93" * 5000, msgspec.msgpack.encode([KV_EVENTS_VERSION + 1, "", 0])):
        asker.send_multipart([b"", junk])
    asker.send_multipart([b"", msgspec.msgpack.encode(SyncRequest(KV_EVENTS_VERSION, "unknown", 2**63))])
    assert asker.poll(PATIENCE_MS)
    reply = decode_reply(asker.recv_multipart()[-1])
    assert reply.snapshot
    assert not asker.poll(50)
    asker.close(0)
    context.term()


def test_messages_of_another_version_or_shape_are_refused():
    with pytest.raises(ProtocolError, match="version 9"):
        decode_batch(msgspec.msgpack.encode([9, "e", 0, []]))
    with pytest.raises(ProtocolError):
        decode_reply(b"\xc1")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://example.org:1"])
@pytest.mark.parametrize("field", ["kv_events", "kv_events_sync"])
def test_nothing_listens_beyond_this_machine_without_keys(endpoint, field):
    options = {"kv_events": "tcp://127.0.0.1:0", field: endpoint}
    with pytest.raises(ConfigError, match="loopback"):
        KvEventPublisher(KvEventsConfig(**options), hash_tokens=1, snapshot=list)


def test_a_taken_or_malformed_endpoint_is_refused_by_name(closing):
    first = closing(KvEventPublisher(KvEventsConfig(kv_events="tcp://127.0.0.1:0"), hash_tokens=1, snapshot=list))
    with pytest.raises(AddressInUseError, match=r"127\.0\.0\.1"):
        KvEventPublisher(KvEventsConfig(kv_events=first.endpoint), hash_tokens=1, snapshot=list)
    with pytest.raises(ConfigError, match="can be bound"):
        KvEventPublisher(KvEventsConfig(kv_events="ipc:///nowhere/at/all"), hash_tokens=1, snapshot=list)


@pytest.mark.parametrize(
    "endpoint",
    ["junk", "tcp://127.0.0.1", "tcp://127.0.0.1:none", "tcp://127.0.0.1:99999", "tcp://:1", "ipc://", "udp://1:1"],
)
def test_a_malformed_endpoint_is_refused_before_anything_starts(endpoint):
    with pytest.raises(ConfigError, match="is no endpoint"):
        KvEventPublisher.check(KvEventsConfig(kv_events=endpoint))


def test_with_keys_only_known_clients_are_answered(closing, tmp_path):
    zmq.auth.create_certificates(tmp_path, "server")
    clients = tmp_path / "clients"
    clients.mkdir()
    zmq.auth.create_certificates(tmp_path, "friend")
    (tmp_path / "friend.key").rename(clients / "friend.key")
    zmq.auth.create_certificates(tmp_path, "stranger")
    served = closing(Served(Cache(2), kv_events="tcp://127.0.0.1:0", kv_events_keys=str(tmp_path)))
    server_key, _ = zmq.auth.load_certificate(tmp_path / "server.key")
    context = zmq.Context()

    def asks(name):
        socket = context.socket(zmq.DEALER)
        if name is not None:
            socket.curve_publickey, socket.curve_secretkey = zmq.auth.load_certificate(tmp_path / f"{name}.key_secret")
            socket.curve_serverkey = server_key
        socket.connect(served.publisher.sync_endpoint)
        socket.send_multipart([b"", msgspec.msgpack.encode(SyncRequest(KV_EVENTS_VERSION))])
        answered = socket.poll(PATIENCE_MS if name == "friend" else 300) != 0
        socket.close(0)
        return answered

    try:
        assert asks("friend")
        assert not asks("stranger")
        assert not asks(None)
    finally:
        context.term()


def test_keys_that_are_missing_are_named(tmp_path):
    config = KvEventsConfig(kv_events="tcp://127.0.0.1:0", kv_events_keys=str(tmp_path))
    with pytest.raises(ConfigError, match="keys for KV events"):
        KvEventPublisher(config, hash_tokens=1, snapshot=list)

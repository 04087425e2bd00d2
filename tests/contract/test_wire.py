"""The wire format: golden bytes, locked field order, old and new readers, and bytes of a stranger."""

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_samples import ALL, FROM_CORE, GOLDEN, TO_CORE, all_structs, sample_bytes

from headrace.base.errors import ProtocolError
from headrace.types.wire import WIRE_VERSION, decode_from_core, decode_to_core, encode

RECORD = json.loads(GOLDEN.read_text())
STRUCTS = all_structs()
ADVICE = "run: python tests/contract/wire_samples.py"
VERSION = bytes([WIRE_VERSION])


def decode(name, data):
    if name in TO_CORE:
        return decode_to_core(data)
    return decode_from_core(data) if name in FROM_CORE else msgspec.msgpack.decode(data, type=type(ALL[name]))


def instances():
    """One instance of each struct, found by walking the samples."""
    found, todo = {}, list(ALL.values())
    while todo:
        item = todo.pop()
        if isinstance(item, msgspec.Struct):
            found.setdefault(type(item).__name__, item)
            todo += msgspec.structs.astuple(item)
        elif isinstance(item, list | tuple):
            todo += item
    return found


INSTANCES = instances()


def test_the_golden_file_is_of_this_version():
    assert RECORD["version"] == WIRE_VERSION
    assert sorted(RECORD["bytes"]) == sorted(ALL), ADVICE


@pytest.mark.parametrize("name", ALL)
def test_bytes_of_each_message_are_pinned(name):
    assert sample_bytes(name).hex() == RECORD["bytes"][name][-1], ADVICE


@pytest.mark.parametrize("name", ALL)
def test_every_encoding_a_message_ever_had_still_decodes_to_it(name):
    for text in RECORD["bytes"][name]:
        assert decode(name, bytes.fromhex(text)) == ALL[name]


@pytest.mark.parametrize("name", STRUCTS)
def test_the_order_of_fields_is_locked(name):
    assert list(STRUCTS[name].__struct_fields__) == RECORD["fields"].get(name), ADVICE


def test_no_struct_of_the_lock_has_vanished():
    assert set(RECORD["fields"]) <= set(STRUCTS)


def test_the_lock_would_notice_a_swap():
    swapped = msgspec.defstruct("PhaseSeconds", [("seconds", float), ("name", str)], array_like=True)
    assert list(swapped.__struct_fields__) != RECORD["fields"]["PhaseSeconds"]


@pytest.mark.parametrize("name", INSTANCES)
def test_an_old_reader_skips_the_trailing_fields_of_a_newer_writer(name):
    item = INSTANCES[name]
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(item))
    newer = msgspec.msgpack.encode([*raw, 42, {"new": ["field"]}])
    assert msgspec.msgpack.decode(newer, type=type(item)) == item


@pytest.mark.parametrize("name", INSTANCES)
def test_a_new_reader_fills_the_fields_that_an_older_writer_lacks(name):
    item = INSTANCES[name]
    fields = msgspec.structs.fields(type(item))
    needed = max((index + 1 for index, field in enumerate(fields) if field.required), default=0)
    tag = 1 if type(item).__struct_config__.tag else 0
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(item))
    for length in range(needed, len(fields)):
        older = msgspec.msgpack.decode(msgspec.msgpack.encode(raw[: length + tag]), type=type(item))
        assert [getattr(older, field.name) for field in fields[:length]] == list(msgspec.structs.astuple(item))[:length]


def test_every_struct_that_crosses_the_socket_has_a_sample():
    assert set(STRUCTS) - set(INSTANCES) <= {"WorkerFacts"}, "WorkerFacts stays inside the core's process group"


@pytest.mark.parametrize("name", TO_CORE | FROM_CORE)
def test_a_message_of_another_version_says_so(name):
    other = bytes([WIRE_VERSION + 1]) + sample_bytes(name)[1:]
    with pytest.raises(ProtocolError, match=f"wire version {WIRE_VERSION} expected, got {WIRE_VERSION + 1}"):
        decode(name, other)


@pytest.mark.parametrize("read", [decode_to_core, decode_from_core])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        VERSION,
        VERSION + b"\xc1",
        VERSION + msgspec.msgpack.encode(["no-such-tag", 1]),
        VERSION + msgspec.msgpack.encode([]),
        VERSION + msgspec.msgpack.encode({"type": "add"}),
        VERSION + b"\x94\xa4call\x01\xa1x" + b"\x91" * 100_000 + b"\x90",
        VERSION + b"\x94\xa4call\x01\xa1x" + b"\xdd\xff\xff\xff\xff",
        VERSION + b"\x94\xa4call\x01\xa1x" + b"\xdf\xff\xff\xff\xff",
        VERSION + b"\x94\xa4call\x01\xa1\xff\x90",
        VERSION + b"\x93\xa5reply\x01" + b"\x91" * 100_000 + b"\x90",
    ],
)
def test_garbage_is_a_protocol_error(read, data):
    with pytest.raises(ProtocolError):
        read(data)


def test_a_message_cut_at_any_byte_is_a_protocol_error():
    for name in TO_CORE | FROM_CORE:
        data = sample_bytes(name)
        for length in range(len(data)):
            with pytest.raises(ProtocolError):
                decode(name, data[:length])


def test_invalid_sampling_parameters_inside_a_message_are_a_protocol_error():
    raw = msgspec.msgpack.decode(sample_bytes("add")[1:])
    raw[1][2][0] = 0  # n
    with pytest.raises(ProtocolError, match="n must be in"):
        decode_to_core(VERSION + msgspec.msgpack.encode(raw))


def test_messages_of_one_direction_are_refused_in_the_other():
    with pytest.raises(ProtocolError):
        decode_from_core(sample_bytes("add"))
    with pytest.raises(ProtocolError):
        decode_to_core(sample_bytes("outputs"))


def survives(data):
    for read in (decode_to_core, decode_from_core):
        try:
            message = read(data)
        except ProtocolError:
            continue
        assert read(encode(message)) is not None


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data):
    survives(data)
    survives(VERSION + data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(TO_CORE | FROM_CORE)), st.integers(0, 10_000), st.binary(min_size=1, max_size=6))
@example("add", 100, b"\xcb\x7f\xf8\x00\x00\x00")
def test_damaged_messages_never_raise_anything_else(name, position, patch):
    data = bytearray(sample_bytes(name))
    at = position % len(data)
    data[at : at + len(patch)] = patch
    survives(bytes(data))


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)
TAGS = ["add", "abort", "reset_prefix_cache", "call", "shutdown", "ready", "outputs", "reply", "failed"]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TAGS), st.lists(PLAIN, max_size=8))
def test_well_formed_messages_of_a_wrong_shape_never_raise_anything_else(tag, values):
    survives(VERSION + msgspec.msgpack.encode([tag, *values]))

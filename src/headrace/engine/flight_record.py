"""The flight record: which requests are on the device right now, readable after the core was killed.

A small file that the core maps and overwrites before each step; pages of a mapped file outlive the process. The front
end reads it only after the core's death. Must not grow, block or raise in the core's step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from headrace.base.ids import RequestId

_LENGTH_BYTES = 8
_UNKNOWN = b"\0" * _LENGTH_BYTES
_BASE_BYTES = 1 << 16
_BYTES_PER_SEQUENCE = 256


class FlightRecorder:
    """The core's side.

    Args:
        path: file to create or overwrite, in the private runtime directory.
        max_num_seqs: most requests that run at once; sizes the file.
    """

    def __init__(self, path: Path, max_num_seqs: int) -> None:
        self._size_bytes = _BASE_BYTES + _BYTES_PER_SEQUENCE * max_num_seqs
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, self._size_bytes)
            self._map = mmap.mmap(descriptor, self._size_bytes)
        finally:
            os.close(descriptor)
        self._encoder = msgspec.msgpack.Encoder()
        self.record(())

    def record(self, request_ids: Iterable[RequestId]) -> None:
        """Replace the record. Ids that do not fit make it 'unknown', and the reader assumes the worst."""
        payload = self._encoder.encode(list(request_ids))
        self._map[:_LENGTH_BYTES] = _UNKNOWN
        end = _LENGTH_BYTES + len(payload)
        if end > self._size_bytes:
            return
        self._map[_LENGTH_BYTES:end] = payload
        self._map[:_LENGTH_BYTES] = len(payload).to_bytes(_LENGTH_BYTES, "little")

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def __enter__(self) -> FlightRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_flight_record(path: Path) -> set[RequestId] | None:
    """Return the requests that were on the device, or None if that is unknown (no file, torn or overfull record)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not 0 < length <= len(data) - _LENGTH_BYTES:
        return None
    try:
        ids = msgspec.msgpack.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length], type=list[str])
    except msgspec.MsgspecError:
        return None
    return {RequestId(request_id) for request_id in ids}

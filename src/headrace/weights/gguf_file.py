"""Reads the header of a GGUF file: metadata and the places of the tensors.

Source of the format: the GGUF specification in the ggml repository (versions 2 and 3, little endian). Every count and
length is checked against the size of the file before anything is allocated, so that a damaged file ends in a typed
error. Must not import torch, and must not read tensor data before it is asked for.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from headrace.base.errors import ModelSourceError, UnsupportedModelError, WeightLoadError
from headrace.weights.gguf_types import OTHER_TYPE_NAMES, TYPES, GgmlType

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"GGUF"
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMS = 4
_MAX_KEY_BYTES = 65536
_MAX_NESTING = 4


@dataclass(frozen=True)
class GgufTensor:
    """Place of one tensor in the file.

    Attributes:
        name: name in llama.cpp's scheme.
        type: storage type.
        shape: outermost dimension first, as torch counts.
        offset_bytes: from the start of the file.
        size_bytes: of the stored data.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class StringArray(Sequence[str]):
    """An array of strings inside the file; a string is decoded when it is read."""

    def __init__(self, data: mmap.mmap, starts: array[int], ends: array[int]) -> None:
        self._data, self._starts, self._ends = data, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return self._data[self._starts[index] : self._ends[index]].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        data = self._data
        for start, end in zip(self._starts, self._ends, strict=True):
            yield data[start:end].decode("utf-8", "replace")

    def tolist(self) -> list[str]:
        """Return all strings. Bytes that are not UTF-8 become replacement characters."""
        return list(self)


class GgufFile:
    """The parsed header of a GGUF file, with its data mapped into memory.

    Attributes:
        path: the file.
        metadata: key -> bool, int, float, str, list, or `StringArray`.
        tensors: name -> place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and parse.

        Args:
            path: the file.

        Raises:
            ModelSourceError: not readable, not GGUF, or the header contradicts itself.
            WeightLoadError: the file ends too early.
            UnsupportedModelError: a tensor type that is not implemented.
        """
        self.path = Path(path)
        self._data, self._size = _map_file(self.path)
        reader = _HeaderReader(self.path, self._data, self._size)
        self.metadata: Mapping[str, Any] = reader.metadata
        self.tensors: Mapping[str, GgufTensor] = reader.tensors

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes of a tensor as uint8 [size_bytes], a view of the mapped file.

        The mapping is private: nobody may write to it, and a write would not reach the file.

        Raises:
            KeyError: no such tensor.
        """
        import numpy as np

        tensor = self.tensors[name]
        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset_bytes)

    @property
    def quantized(self) -> bool:
        """True if any tensor is stored in a quantised type."""
        return any(tensor.type.quantized for tensor in self.tensors.values())


def _map_file(path: Path) -> tuple[mmap.mmap, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise WeightLoadError(
                    f"{path}: {size} bytes are too few for a GGUF file; it is truncated, fetch it again"
                )
            # A private copy-on-write mapping: arrays on it are formally writable, which torch wants to see.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), size
    except OSError as error:
        raise ModelSourceError(f"{path}: cannot be read: {error.strerror or error}", param="model") from error


class _HeaderReader:
    """Walks the header once. ``_at`` is the position of the next byte."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 4
        if data[:4] != _MAGIC:
            raise ModelSourceError(f"{path}: is not a GGUF file (it begins with {data[:4]!r})", param="model")
        version = self._scalar("I")
        if version not in (2, 3):
            order = "; it is big endian" if version in (2 << 24, 3 << 24) else ""
            raise ModelSourceError(
                f"{path}: GGUF version {version} is not supported, only 2 and 3{order}", param="model"
            )
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        # The smallest entry takes 13 bytes (key) or 24 (tensor), which bounds both counts by the file's size.
        self._need_room(tensor_count * 24 + key_count * 13, f"{tensor_count} tensors and {key_count} keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            self._read_key()
        self.tensors = self._read_tensors(tensor_count)

    def _bad(self, message: str) -> ModelSourceError:
        return ModelSourceError(f"{self._path}: damaged GGUF header: {message}", param="model")

    def _need_room(self, size: int, what: str) -> None:
        if size > self._size - self._at:
            raise WeightLoadError(
                f"{self._path}: the header announces {what} at byte {self._at}, but the file has only {self._size} "
                "bytes; it is truncated or damaged, fetch it again"
            )

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need_room(size, f"a value of {size} bytes")
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _string(self, limit_bytes: int) -> str:
        length = self._scalar("Q")
        if length > limit_bytes:
            raise self._bad(f"a string of {length} bytes at byte {self._at}")
        self._need_room(length, f"a string of {length} bytes")
        text = self._data[self._at : self._at + length].decode("utf-8", "replace")
        self._at += length
        return text

    def _read_key(self) -> None:
        key = self._string(_MAX_KEY_BYTES)
        if key in self.metadata:
            raise self._bad(f"key {key!r} occurs twice")
        self.metadata[key] = self._value(self._scalar("I"), key, 0)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(self._size)
        if kind != _ARRAY:
            raise self._bad(f"key {key!r} has the unknown type {kind}")
        if depth >= _MAX_NESTING:
            raise self._bad(f"key {key!r} nests arrays more than {_MAX_NESTING} deep")
        return self._array(key, depth)

    def _array(self, key: str, depth: int) -> Any:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count, key)
        if kind == _ARRAY:
            self._need_room(count * 12, f"{count} arrays in {key!r}")
            return [self._value(kind, key, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._bad(f"array {key!r} has the unknown element type {kind}")
        code = _SCALARS[kind]
        size = struct.calcsize("<" + code) * count
        self._need_room(size, f"{count} values in {key!r}")
        values = list(struct.unpack_from(f"<{count}{code}", self._data, self._at))
        self._at += size
        return values

    def _strings(self, count: int, key: str) -> StringArray:
        """Note where each string lies. This loop runs about 100,000 times for a usual vocabulary."""
        self._need_room(count * 8, f"{count} strings in {key!r}")
        starts, ends = array("Q"), array("Q")
        add_start, add_end = starts.append, ends.append
        unpack, data, at, last = _LENGTH.unpack_from, self._data, self._at, self._size
        for _ in range(count):
            if at + 8 > last:
                break
            start = at + 8
            at = start + unpack(data, at)[0]
            add_start(start)
            add_end(at)
        if len(starts) != count or at > last:
            raise WeightLoadError(
                f"{self._path}: the file ends inside {key!r}; it is truncated or damaged, fetch it again"
            )
        self._at = at
        return StringArray(data, starts, ends)

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[tuple[int, ...], GgmlType, int]] = {}
        for _ in range(count):
            name = self._string(_MAX_KEY_BYTES)
            dims = self._scalar("I")
            if name in entries or not 1 <= dims <= _MAX_DIMS:
                raise self._bad(
                    f"tensor {name!r} occurs twice" if name in entries else f"tensor {name!r} has {dims} dimensions"
                )
            shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
            number, offset = self._scalar("I"), self._scalar("Q")
            if number not in TYPES:
                known = ", ".join(item.name for item in TYPES.values())
                raise UnsupportedModelError(
                    f"{self._path}: tensor {name!r} has type {OTHER_TYPE_NAMES.get(number, number)}, which is not "
                    f"supported; supported: {known}",
                    param="model",
                )
            entries[name] = (shape, TYPES[number], offset)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > 1 << 20:
            raise self._bad(f"general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        return {name: self._place(name, *entry, base, alignment) for name, entry in entries.items()}

    def _place(
        self, name: str, shape: tuple[int, ...], kind: GgmlType, offset: int, base: int, alignment: int
    ) -> GgufTensor:
        values = 1
        for size in shape:
            values *= size
        if values == 0 or shape[-1] % kind.block_values:
            raise self._bad(f"tensor {name!r} has shape {list(shape)}, which {kind.name} cannot hold")
        size_bytes = values // kind.block_values * kind.block_bytes
        if offset % alignment:
            raise self._bad(f"tensor {name!r} lies at {offset}, which is not a multiple of {alignment}")
        end = base + offset + size_bytes
        if end > self._size:
            raise WeightLoadError(
                f"{self._path}: tensor {name!r} ends at byte {end}, but the file has only {self._size}; it is "
                "truncated, fetch it again"
            )
        return GgufTensor(name, kind, shape, base + offset, size_bytes)

"""Loads each tensor of a checkpoint into its target exactly once, or fails naming the tensor.

Formats: safetensors (one file or several), GGUF, and random values for measuring. Must not know model classes: it sees
names, shapes and callables. Pickle files are never opened.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from headrace.base.errors import WeightLoadError, invariant
from headrace.weights.gguf_config import ROPE_FACTORS
from headrace.weights.gguf_dequant import dequantize
from headrace.weights.gguf_file import GgufFile
from headrace.weights.gguf_names import hf_name, restore_values
from headrace.weights.source import ModelFiles
from headrace.weights.target import WeightTarget

_DUMMY_STD = 0.02
# Random values are drawn once up to this many and then repeated: drawing 7 billion would take half a minute.
_DUMMY_POOL_VALUES = (1 << 20) + 7
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class LoadReport:
    """What was loaded.

    Attributes:
        tensors: number of targets filled.
        bytes: size of the values as stored in the files; 0 for random values.
        ignored: names in the files that no target asked for and that were allowed to be there.
    """

    tensors: int
    bytes: int
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    """One stored tensor: its shape is known before its values are read."""

    name: str
    shape: tuple[int, ...]
    size_bytes: int
    where: str
    read: Callable[[], torch.Tensor]


def load_weights(
    files: ModelFiles, targets: Mapping[str, WeightTarget], *, ignorable: Sequence[str] = (), seed: int = 0
) -> LoadReport:
    """Fill every target from the model's files.

    Args:
        files: from `resolve_model`.
        targets: checkpoint name -> target.
        ignorable: patterns (as in fnmatch) of names that may be in the files without a target.
        seed: of random values, for ``files.kind == "dummy"`` only. A tensor's values depend on the seed and its name
            alone, so ranks agree.

    Returns:
        Counts.

    Raises:
        WeightLoadError: a tensor is missing, surplus, stored twice, of another shape or not of a float type, or a file
            is truncated. The message names it.
    """
    if files.kind == "dummy":
        for name, target in targets.items():
            target.load(dummy_values(name, target.shape, seed))
        return LoadReport(len(targets), 0, ())
    entries = _gguf_entries(files) if files.kind == "gguf" else _safetensors_entries(files.weight_paths)
    loaded: dict[str, str] = {}
    ignored: list[str] = []
    surplus: list[str] = []
    size_bytes = 0
    for entry in entries:
        if entry.name in loaded:
            raise WeightLoadError(
                f"tensor {entry.name!r} is stored twice: in {loaded[entry.name]} and in {entry.where}"
            )
        target_of_name = targets.get(entry.name)
        if target_of_name is None:
            allowed = any(fnmatchcase(entry.name, pattern) for pattern in ignorable)
            (ignored if allowed else surplus).append(entry.name)
            continue
        _load_entry(entry, target_of_name)
        loaded[entry.name] = entry.where
        size_bytes += entry.size_bytes
    _check_complete(files, targets, loaded, surplus)
    return LoadReport(len(loaded), size_bytes, tuple(ignored))


def dummy_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random float32 values: normal with standard deviation 0.02, around 1 for norms, else around 0."""
    # The CPU generator looks at 32 bits of a seed only, so both go into one hash.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = 1
    for size in shape:
        values *= size
    pool = torch.randn(min(values, _DUMMY_POOL_VALUES), generator=generator).mul_(_DUMMY_STD)
    if name.endswith("norm.weight"):
        pool.add_(1.0)
    repeats = -(-values // max(1, pool.numel()))
    return (pool if repeats <= 1 else pool.repeat(repeats)[:values]).reshape(shape)


def _load_entry(entry: _Entry, target: WeightTarget) -> None:
    if entry.shape != tuple(target.shape):
        raise WeightLoadError(
            f"tensor {entry.name!r} in {entry.where} has shape {list(entry.shape)}, but the configuration asks for "
            f"{list(target.shape)}"
        )
    tensor = entry.read()
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise WeightLoadError(
            f"tensor {entry.name!r} in {entry.where} has type {str(tensor.dtype).removeprefix('torch.')}; only "
            "float32, float16, bfloat16 and float64 checkpoints are supported"
        )
    target.load(tensor)


def _check_complete(
    files: ModelFiles, targets: Mapping[str, WeightTarget], loaded: Mapping[str, str], surplus: Sequence[str]
) -> None:
    missing = [name for name in targets if name not in loaded]
    problems = []
    if missing:
        problems.append(f"missing ({len(missing)}): {_some(missing)}")
    if surplus:
        problems.append(f"not of this model ({len(surplus)}): {_some(surplus)}")
    if problems:
        raise WeightLoadError(
            f"the weights of {files.name} do not match its configuration: tensors " + "; ".join(problems)
        )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _safetensors_entries(paths: Sequence[Path]) -> Iterator[_Entry]:
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    tensor_shape = tuple(int(size) for size in part.get_shape())

                    def read(name: str = name, file: safe_open = file, path: Path = path) -> torch.Tensor:
                        try:
                            return file.get_tensor(name)
                        except (SafetensorError, OSError) as error:
                            raise WeightLoadError(f"{path}: tensor {name!r} cannot be read: {error}") from error

                    yield _Entry(name, tensor_shape, _stored_bytes(tensor_shape, part.get_dtype()), path.name, read)
        except (SafetensorError, OSError) as error:
            raise WeightLoadError(
                f"{path}: cannot be read as safetensors ({error}); it is truncated or damaged, fetch it again"
            ) from error


def _stored_bytes(shape: tuple[int, ...], dtype: str) -> int:
    values = 1
    for size in shape:
        values *= size
    bits = "".join(character for character in dtype.split("_")[0] if character.isdigit())
    return values * int(bits or 8) // 8


def _gguf_entries(files: ModelFiles) -> Iterator[_Entry]:
    path = files.gguf_path
    invariant(path is not None, "a GGUF model without its path")
    gguf = GgufFile(str(path))
    heads, kv_heads = int(files.config["num_attention_heads"]), int(files.config["num_key_value_heads"])
    arch = str(gguf.metadata.get("general.architecture"))
    for tensor in gguf.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue  # became a part of the configuration
        name = hf_name(tensor.name, arch) or tensor.name

        def read(stored: str = tensor.name, name: str = name) -> torch.Tensor:
            place = gguf.tensors[stored]
            values = dequantize(gguf.raw(stored), place.type.name, place.shape)
            return restore_values(name, values, arch, heads, kv_heads)

        yield _Entry(name, tensor.shape, tensor.size_bytes, gguf.path.name, read)

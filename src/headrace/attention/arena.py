"""The KV memory of a rank: one row of granules, and what each layer sees of it.

A block id is the offset of the block's first granule, so a group's view has one stride between ids: a granule. Must not
know how attention is computed, nor decide who owns a block.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.attention.contract import AttentionBackend, Scoring
from headrace.attention.memory import BlockMemory, Finite
from headrace.attention.select import load_backend
from headrace.attention.step import StateRows, StepContext
from headrace.base.errors import InvariantError, UnsupportedModelError, invariant
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GroupLayout,
    KvLayout,
    RecurrentSpec,
    SlidingWindowSpec,
    kind_of,
)
from headrace.types.plans import BlockCopy


def zeroed_bytes(count_bytes: int, device: torch.device) -> Tensor:
    """Return zero bytes; on a CPU without touching them.

    A CPU cache is gigabytes, and writing zeros takes about a second for each. Pages that the system maps are zero
    already and cost nothing until first used; huge pages, where the system grants them, are read faster.
    """
    if device.type != "cpu" or not count_bytes:
        return torch.zeros(count_bytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, count_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel built without huge pages: ordinary ones do.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class LayerAttention:
    """Attention of one layer over its memory. A layer keeps it from `KvArena.attention` and calls it every step.

    Args:
        group: index of its group.
        place: index of the layer in the group.
        backend: of the group.
        scoring: of the layer.
        writes: False for a layer that reads another layer's cache.
    """

    def __init__(self, group: int, place: int, backend: AttentionBackend, scoring: Scoring, *, writes: bool) -> None:
        self._group, self._place = group, place
        self._backend, self._scoring, self._writes = backend, scoring, writes

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, step: StepContext) -> Tensor:
        """Write this step's keys and values, then attend as the layer's cache spec says.

        Args:
            q: [T, heads, dim], rotated.
            k: [T, kv_heads, dim], rotated; None for a layer with a `SharedSpec`.
            v: [T, kv_heads, dim]; None with k.
            step: of the runner.

        Returns:
            [T, heads, dim].

        Mutates:
            the slots of the step's tokens in this layer's memory.
        """
        if (k is not None) != self._writes:
            raise InvariantError("a layer passes keys and values exactly if its cache is its own")
        prepared = step.attention(self._group, self._backend)
        return self._backend.forward(q, k, v, self._place, prepared, self._scoring)


class LayerState:
    """Recurrent state of one layer. A layer keeps it from `KvArena.state` and uses it every step.

    Attributes:
        views: by part name, [ids, *shape] over the arena: ``views[name][rows.ids]`` are the rows' states.

    Args:
        group: index of its group.
        views: by part name.
    """

    def __init__(self, group: int, views: dict[str, Tensor]) -> None:
        self._group = group
        self.views = views

    def rows(self, step: StepContext) -> StateRows:
        """Return the ids of a step's states, which of them are fresh, and the rows' starts and tokens."""
        return step.state_rows(self._group)

    def read(self, name: str, rows: StateRows) -> Tensor:
        """Return a copy [R, *shape] of the rows' states; zero where a row is fresh."""
        view = self.views[name]
        picked = view.index_select(0, rows.ids)
        return picked.masked_fill_(rows.fresh.view(-1, *[1] * (view.dim() - 1)), 0)

    def write(self, name: str, rows: StateRows, value: Tensor) -> None:
        """Store [R, *shape] as the rows' states.

        Mutates:
            the working states of the rows.
        """
        view = self.views[name]
        view.index_copy_(0, rows.ids, value.to(view.dtype))


class KvArena:
    """All KV memory of a rank.

    Attributes:
        layout: of the memory.
        memory: [bytes] uint8; all of it.
        device: of the memory.

    Args:
        layout: of the memory.
        dtype: of keys and values.
        device: of the memory.
        backends: name of the attention backend of each attention group, by group index.

    Raises:
        UnsupportedModelError: a kind of cache, or a shape, that no backend here holds yet.
        InvariantError: a layout that does not fit the types.
    """

    def __init__(self, layout: KvLayout, dtype: torch.dtype, device: torch.device, backends: Mapping[int, str]) -> None:
        self.layout = layout
        self.device = device
        invariant(layout.granule_bytes > 0 or not layout.groups, "a KV layout without granules, as of an older engine")
        self._granule_bytes = layout.granule_bytes
        self.memory = zeroed_bytes(layout.total_bytes(), device)
        # Bits of one type may be no number in another; on a GPU nobody looks at the values (a synchronisation).
        plain = all(not isinstance(group.spec, RecurrentSpec) for group in layout.groups)
        self._finite = Finite(device.type == "cpu" and plain)
        self._places: dict[tuple[int, str], tuple[GroupLayout, int]] = {}
        self._backends: dict[int, AttentionBackend] = {}
        for group in layout.groups:
            parts = group.parts or ["kv"] * len(group.layer_indices)
            for place, key in enumerate(zip(group.layer_indices, parts, strict=True)):
                self._places[key] = (group, place)
            if isinstance(group.spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalSpec):
                memory = BlockMemory(group, self.memory, self._granule_bytes, dtype, self._finite)
                self._backends[group.group] = load_backend(backends[group.group], memory)
            elif not isinstance(group.spec, RecurrentSpec):
                raise UnsupportedModelError(f"the worker keeps no {kind_of(group.spec)} caches yet")
        self._shared = dict(layout.shared_layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of the memory."""
        return self.memory.numel()

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.layout.groups)

    def attention(self, layer_index: int, scoring: Scoring, part: str = "kv") -> LayerAttention:
        """Return the attention of a layer; of another layer's cache if the layer declared a `SharedSpec`.

        Args:
            layer_index: of the layer.
            scoring: of the layer.
            part: of its declaration.
        """
        source = self._shared.get(layer_index)
        group, place = self._place(layer_index if source is None else source, part)
        backend = self._backends.get(group.group)
        if backend is None:
            raise InvariantError(f"layer {layer_index} declared a {kind_of(group.spec)} cache and asks for attention")
        return LayerAttention(group.group, place, backend, scoring, writes=source is None)

    def state(self, layer_index: int, dtypes: Mapping[str, torch.dtype], part: str = "kv") -> LayerState:
        """Return the recurrent state of a layer.

        Args:
            layer_index: of the layer.
            dtypes: type of each part of the state, by its name.
            part: of the layer's declaration.
        """
        group, place = self._place(layer_index, part)
        if not isinstance(group.spec, RecurrentSpec):
            raise InvariantError(f"layer {layer_index} declared a {kind_of(group.spec)} cache and asks for a state")
        views = {}
        offset = place * group.spec.block_bytes(0)
        for piece in group.spec.parts:
            dtype = dtypes[piece.name]
            invariant(dtype.itemsize == piece.dtype_bytes, f"state {piece.name}: {dtype} has not {piece.dtype_bytes} B")
            views[piece.name] = self._view(offset, piece.shape, dtype)
            offset += piece.part_bytes()
        return LayerState(group.group, views)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all layers of their group, one after the other.

        Mutates:
            the target blocks.
        """
        for copy in copies:
            block_bytes = self.layout.groups[copy.group].block_bytes()
            source, target = copy.source * self._granule_bytes, copy.target * self._granule_bytes
            self.memory[target : target + block_bytes].copy_(self.memory[source : source + block_bytes])

    def observe(self, hidden: Tensor) -> None:
        """Look at the final hidden states [T, H]: non-finite ones mean that the memory now holds non-finite values."""
        if self._finite.assumed and not math.isfinite(hidden.sum().item()):
            self._finite.assumed = bool(torch.isfinite(hidden).all().item())

    def _place(self, layer_index: int, part: str) -> tuple[GroupLayout, int]:
        found = self._places.get((layer_index, part))
        if found is None:
            raise InvariantError(f"the layout has no cache {part!r} of layer {layer_index}")
        return found

    def _view(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return [ids, *shape]: the part of every possible block that lies ``offset_bytes`` behind its start."""
        size, part = dtype.itemsize, math.prod(shape) * dtype.itemsize
        aligned = self._granule_bytes % size == 0 and offset_bytes % size == 0
        invariant(aligned, f"granules of {self._granule_bytes} B do not hold {dtype} at offset {offset_bytes}")
        ids = (self.memory.numel() - offset_bytes - part) // self._granule_bytes + 1
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        typed = self.memory[: self.memory.numel() // size * size].view(dtype)
        return typed.as_strided((ids, *shape), (self._granule_bytes // size, *strides), offset_bytes // size)

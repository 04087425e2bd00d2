"""Block-major KV memory of one group: allocate, write by slot, gather by block table.

One tensor [num_blocks, layers, 2, block_tokens, kv_heads, dim]: a block holds all layers contiguously, so that a tier
moves it in one copy. Must not know how attention is computed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.attention.contract import LayerKv, RowBatch
from headrace.base.errors import UnsupportedModelError, invariant
from headrace.types.cache_specs import ChunkedLocalSpec, FullAttentionSpec, GroupLayout, SlidingWindowSpec, kind_of


def zeroed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of ``shape``; on a CPU without touching them.

    A CPU cache is gigabytes, and writing zeros takes about a second for each. Pages that the system maps are zero
    already and cost nothing until first used; huge pages, where the system grants them, are read faster.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel built without huge pages: ordinary ones do.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


class BlockMemory:
    """KV memory of a group, with the two views that writing and gathering need.

    Args:
        group: layout; keys and values must be equally wide.
        dtype: of the cache.
        device: of the cache.

    Raises:
        UnsupportedModelError: keys and values of different width.
    """

    def __init__(self, group: GroupLayout, dtype: torch.dtype, device: torch.device) -> None:
        spec = group.spec
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalSpec):
            raise UnsupportedModelError(f"this attention backend keeps keys and values, not {kind_of(spec)} caches")
        if spec.key_dim != spec.value_dim:
            raise UnsupportedModelError(
                f"keys of {spec.key_dim} and values of {spec.value_dim} elements: must be equal"
            )
        self.layers = len(group.layer_indices)
        self.block_tokens = group.block_tokens
        self.num_blocks = group.num_blocks
        self.heads, self.dim = spec.kv_heads, spec.key_dim
        shape = (self.num_blocks, self.layers, 2, self.block_tokens, self.heads, self.dim)
        # Zeroed: a masked key that was never written must still be finite, since 0 * NaN is NaN.
        self.memory = zeroed(shape, dtype, device)
        self._tokens = self.memory.view(-1, self.heads * self.dim)
        self._halves = self.memory.view(-1, self.block_tokens * self.heads * self.dim)
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self._layer_indices = list(group.layer_indices)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the cache."""
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.memory.device

    def layer_kv(self) -> dict[int, LayerKv]:
        """Return the views of each layer, by layer index."""
        return {
            index: LayerKv(self.memory[:, place, 0], self.memory[:, place, 1], self.memory, place)
            for place, index in enumerate(self._layer_indices)
        }

    def slot_rows(self, batch: RowBatch) -> list[tuple[Tensor, Tensor]]:
        """Return for each layer the rows of the token view where a step's keys and where its values go.

        Args:
            batch: rows of the step; their block tables must cover every token.
        """
        parts = []
        for start, tokens, table in zip(batch.starts, batch.tokens, batch.block_tables, strict=True):
            last = start + tokens - 1
            invariant(last // self.block_tokens < len(table), f"block table of {len(table)} ends before token {last}")
            if tokens == 1:
                parts.append((table[last // self.block_tokens], last % self.block_tokens))
                continue
            parts.extend((table[p // self.block_tokens], p % self.block_tokens) for p in range(start, last + 1))
        pairs = np.array(parts, np.int64)
        half = 2 * self.block_tokens
        first_layer = pairs[:, 0] * (self.layers * half) + pairs[:, 1]
        keys = self._of_layers(first_layer, half)
        return list(zip(keys, self._of_layers(first_layer + self.block_tokens, half), strict=True))

    def table_rows(self, tables: Sequence[Sequence[int]], blocks: int) -> list[Tensor]:
        """Return for each layer the rows of the half-block view that `gather` reads: keys of all tables, then values.

        Args:
            tables: block tables of R rows; a shorter one is filled up with the null block.
            blocks: blocks to read of each.

        Returns:
            Per layer [2 * R * blocks] int64.
        """
        filled = np.zeros((len(tables), blocks), np.int64)
        for row, table in enumerate(tables):
            used = table[:blocks]
            filled[row, : len(used)] = used
        keys = filled.ravel() * (self.layers * 2)
        return self._of_layers(np.concatenate((keys, keys + 1)), 2)

    def write(self, rows: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Store the keys and values of a step.

        Args:
            rows: of the layer, from `slot_rows`.
            k: [T, heads, dim].
            v: [T, heads, dim].

        Mutates:
            the memory of these slots, and nothing else.
        """
        tokens, width = k.shape[0], self.heads * self.dim
        key_rows, value_rows = rows
        self._tokens.index_copy_(0, key_rows, k.reshape(tokens, width).to(self.dtype))
        self._tokens.index_copy_(0, value_rows, v.reshape(tokens, width).to(self.dtype))

    def gather(self, rows: Tensor, tables: int) -> Tensor:
        """Return keys and values [2, tables, S, heads, dim] of whole blocks. Valid until the next call.

        Args:
            rows: of the layer, from `table_rows`.
            tables: number of block tables in it.
        """
        width = self._halves.shape[1]
        count = rows.shape[0] * width
        if self._scratch.numel() < count:
            # Fresh pages are dear: keep one buffer, and let it grow by more than what is asked for.
            self._scratch = torch.empty(count + count // 2, dtype=self.dtype, device=self.device)
        out = self._scratch[:count].view(-1, width)
        torch.index_select(self._halves, 0, rows, out=out)
        return out.view(2, tables, -1, self.heads, self.dim)

    def _of_layers(self, first_layer: npt.NDArray[np.int64], step: int) -> list[Tensor]:
        offsets = np.arange(self.layers, dtype=np.int64)[:, None] * step
        return list(torch.from_numpy(first_layer[None, :] + offsets).to(self.device).unbind(0))

"""Memory of one attention group inside the arena: write by slot, gather by block table.

A block is [layers, 2, block_tokens, kv_heads, dim] from the granule that its id names. Must not know how attention is
computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.attention.contract import Ints, Reach, RowBatch
from headrace.base.errors import UnsupportedModelError, invariant
from headrace.types.cache_specs import ChunkedLocalSpec, FullAttentionSpec, GroupLayout, SlidingWindowSpec, kind_of


@dataclass
class Finite:
    """Whether all values that attention may meet are finite; one for the whole arena.

    Attributes:
        assumed: False once a value that is no number may stand anywhere in the memory.
    """

    assumed: bool


@dataclass(frozen=True)
class Read:
    """Blocks to gather, for every layer of a group.

    Attributes:
        rows: of the view by halves of blocks: keys of all tables, then values.
        tables: number of tables.
        unwritten: tokens of the gathered tables that may be no numbers and are made zero; None if there are none.
    """

    rows: Tensor
    tables: int
    unwritten: Tensor | None


class BlockMemory:
    """KV memory of an attention group.

    Args:
        group: layout; keys and values must be equally wide.
        arena: [bytes] uint8; everything.
        granule_bytes: distance between ids.
        dtype: of the cache.
        finite: of the arena.

    Raises:
        UnsupportedModelError: keys and values of different width.
        InvariantError: a layout that does not fit the type.
    """

    def __init__(
        self, group: GroupLayout, arena: Tensor, granule_bytes: int, dtype: torch.dtype, finite: Finite
    ) -> None:
        spec = group.spec
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalSpec):
            raise UnsupportedModelError(f"this attention backend keeps keys and values, not {kind_of(spec)} caches")
        if spec.key_dim != spec.value_dim:
            raise UnsupportedModelError(
                f"keys of {spec.key_dim} and values of {spec.value_dim} elements: must be equal"
            )
        invariant(spec.dtype_bytes == dtype.itemsize, f"a cache of {dtype} under a spec of {spec.dtype_bytes} B")
        invariant(granule_bytes % dtype.itemsize == 0, f"granules of {granule_bytes} B do not hold {dtype}")
        self.reach = Reach.of(spec)
        self.layers = len(group.layer_indices)
        self.block_tokens = group.block_tokens
        self.heads, self.dim = spec.kv_heads, spec.key_dim
        self.finite = finite
        self._typed = arena[: arena.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        self._granule = granule_bytes // dtype.itemsize
        token = self.heads * self.dim
        self._half = self.block_tokens * token
        # Rows that a step writes or gathers begin at multiples of these; in the plain case they are the rows' width.
        self._token_unit = math.gcd(token, self._granule)
        self._half_unit = math.gcd(self._half, self._granule)
        self._tokens = [self._layer_view(place, token, self._token_unit) for place in range(self.layers)]
        self._halves = [self._layer_view(place, self._half, self._half_unit) for place in range(self.layers)]
        self._scratch = torch.empty(0, dtype=dtype, device=arena.device)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the cache."""
        return self._typed.dtype

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._typed.device

    def layer_views(self, place: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each [ids, block_tokens, kv_heads, dim]."""
        block = self.layers * 2 * self._half
        ids = (self._typed.numel() - block) // self._granule + 1
        shape = (ids, self.block_tokens, self.heads, self.dim)
        strides = (self._granule, self.heads * self.dim, self.dim, 1)
        keys = place * 2 * self._half
        return self._typed.as_strided(shape, strides, keys), self._typed.as_strided(shape, strides, keys + self._half)

    def slot_rows(self, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """Return where a step's keys and where its values go; for every layer.

        Args:
            batch: rows of the step; their block tables must cover every token.

        Raises:
            InvariantError: a token without a block of its own.
        """
        counts = batch.tokens
        total = int(counts.sum())
        if total == len(counts):
            positions, slots = batch.starts, batch.slots
        else:
            firsts = counts.cumsum() - counts
            positions = np.arange(total) - np.repeat(firsts - batch.starts, counts)
            slots = np.repeat(batch.slots, counts)
        last = int(positions.max())
        invariant(last // self.block_tokens < batch.tables.shape[1], f"block tables end before token {last}")
        ids = batch.tables[slots, positions // self.block_tokens]
        if not ids.all():
            bare = int(positions[int(np.flatnonzero(ids == 0)[0])])
            invariant(False, f"block table has no block for token {bare}")
        token, unit = self.heads * self.dim, self._token_unit
        keys = ids * (self._granule // unit) + positions % self.block_tokens * (token // unit)
        return self._index(keys), self._index(keys + self._half // unit)

    def read(self, batch: RowBatch, rows: Ints, base: Ints, blocks: int, first: Ints, last: Ints) -> Read:
        """Return what `gather` needs to read ``blocks`` blocks of some tables from block ``base`` on.

        Blocks outside the tokens [first, last] are not read: the null block, which is zero, stands for them. A table of
        a group that frees behind may still name blocks there that belong to others by now.

        Args:
            batch: rows of the step.
            rows: [n] indices into the batch.
            base: [n] block to begin with.
            blocks: blocks of each table.
            first: [n] first token that is needed.
            last: [n] last token that is needed; behind it nothing has been written for the row.
        """
        places = base[:, None] + np.arange(blocks)
        inside = (places >= (first // self.block_tokens)[:, None]) & (places <= (last // self.block_tokens)[:, None])
        column = np.minimum(places, batch.tables.shape[1] - 1)
        ids = np.where(inside, batch.tables[batch.slots[rows][:, None], column], 0)
        keys = ids.ravel() * (self._granule // self._half_unit)
        where = self._index(np.concatenate((keys, keys + self._half // self._half_unit)))
        return Read(where, len(rows), None if self.finite.assumed else self._unwritten(base, blocks, last))

    def _unwritten(self, base: Ints, blocks: int, last: Ints) -> Tensor | None:
        # Behind the last token its block holds what an earlier owner left; a weight of zero does not silence a NaN.
        columns = last + 1 - base * self.block_tokens
        counts = -(last + 1) % self.block_tokens
        if not counts.any():
            return None
        flat = np.arange(len(last)) * (blocks * self.block_tokens) + columns
        steps = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        return self._index(np.repeat(flat, counts) + steps)

    def write(self, place: int, rows: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Store the keys and values of a step.

        Args:
            place: of the layer.
            rows: from `slot_rows`.
            k: [T, heads, dim].
            v: [T, heads, dim].

        Mutates:
            the memory of these slots, and nothing else.
        """
        tokens, width = k.shape[0], self.heads * self.dim
        view = self._tokens[place]
        view.index_copy_(0, rows[0], k.reshape(tokens, width).to(self.dtype))
        view.index_copy_(0, rows[1], v.reshape(tokens, width).to(self.dtype))

    def gather(self, place: int, read: Read) -> Tensor:
        """Return keys and values [2, tables, S, heads, dim] of whole blocks. Valid until the next call.

        Args:
            place: of the layer.
            read: from `read`.
        """
        count = read.rows.shape[0] * self._half
        if self._scratch.numel() < count:
            # Fresh pages are dear: keep one buffer, and let it grow by more than what is asked for.
            self._scratch = torch.empty(count + count // 2, dtype=self.dtype, device=self.device)
        out = self._scratch[:count].view(-1, self._half)
        torch.index_select(self._halves[place], 0, read.rows, out=out)
        if read.unwritten is not None:
            out.view(2, -1, self.heads * self.dim).index_fill_(1, read.unwritten, 0)
        return out.view(2, read.tables, -1, self.heads, self.dim)

    def _layer_view(self, place: int, width: int, unit: int) -> Tensor:
        offset = place * 2 * self._half
        rows = (self._typed.numel() - offset - width) // unit + 1
        return self._typed.as_strided((rows, width), (unit, 1), offset)

    def _index(self, rows: Ints) -> Tensor:
        return torch.from_numpy(rows).to(self.device)

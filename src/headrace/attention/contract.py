"""What an attention backend is: the rows of a step in, the KV memory of a group, attention out.

The contract only; must not choose a backend (see `select`) nor know a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.attention.capability import Capability
from headrace.base.errors import invariant
from headrace.types.cache_specs import CacheSpec, ChunkedLocalSpec, SlidingWindowSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reach:
    """Which keys a position reads: from `first` to itself. At most one of the bounds is set; none is plain causal.

    Attributes:
        window_tokens: the position and the window_tokens - 1 before it; 0 is no window.
        chunk_tokens: from the start of the position's chunk; 0 is no chunks.
    """

    window_tokens: int = 0
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        invariant(not (self.window_tokens and self.chunk_tokens), "a reach cannot have a window and chunks")

    @classmethod
    def of(cls, spec: CacheSpec) -> Reach:
        """Return what a cache spec says about reading."""
        if isinstance(spec, SlidingWindowSpec):
            return cls(window_tokens=spec.window_tokens)
        if isinstance(spec, ChunkedLocalSpec):
            return cls(chunk_tokens=spec.chunk_tokens)
        return cls()

    @property
    def bounded(self) -> bool:
        """False if a position reads everything before it."""
        return bool(self.window_tokens or self.chunk_tokens)

    def first(self, positions: Ints) -> Ints:
        """Return the first position that each of ``positions`` reads; it does not fall where positions rise."""
        if self.window_tokens:
            return np.maximum(positions - (self.window_tokens - 1), 0)
        if self.chunk_tokens:
            return positions // self.chunk_tokens * self.chunk_tokens
        return np.zeros_like(positions)


@dataclass(frozen=True)
class Scoring:
    """How a layer turns products of queries and keys into weights.

    Attributes:
        scale: factor on the products.
        soft_cap: c in ``c * tanh(score / c)``, after the scale; None without.
        sinks: [heads] one logit a query head that takes weight and gives nothing; None without.
    """

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True without cap and sinks."""
        return self.soft_cap is None and self.sinks is None


@dataclass(frozen=True)
class RowBatch:
    """Rows of one step in plan order, for one group; token t of row r has position ``starts[r] + t``.

    Attributes:
        starts: [R] position of each row's first token.
        tokens: [R] tokens of each row; their sum is T.
        tables: [slots, capacity] block ids from position 0; entries behind a table's end are the null block.
        slots: [R] which table each row uses.
    """

    starts: Ints
    tokens: Ints
    tables: Ints
    slots: Ints

    @classmethod
    def of(cls, starts: Sequence[int], tokens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> RowBatch:
        """Return a batch from plain lists, one table a row."""
        tables = np.zeros((len(block_tables), max(map(len, block_tables), default=0)), np.int64)
        for filled, table in zip(tables, block_tables, strict=True):
            filled[: len(table)] = table
        return cls(np.array(starts, np.int64), np.array(tokens, np.int64), tables, np.arange(len(block_tables)))


class AttentionBackend(Protocol):
    """Paged attention over the memory of one group; made by `select.load_backend` with that memory."""

    name: str
    capability: Capability

    def prepare(self, batch: RowBatch) -> Any:
        """Return what all layers of the group share in a step."""
        ...

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, place: int, prepared: Any, scoring: Scoring
    ) -> Tensor:
        """Write k and v into the cache, then attend.

        Args:
            q: [T, heads, dim], rotated.
            k: [T, kv_heads, dim], rotated; None if another layer has written this step's keys and values.
            v: [T, kv_heads, dim], or None with k.
            place: index of the layer in its group.
            prepared: from `prepare`.
            scoring: of the layer.

        Returns:
            [T, heads, dim].

        Mutates:
            the slots of the step's tokens in the group's memory.
        """
        ...

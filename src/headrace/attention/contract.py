"""What an attention backend is: the rows of a step in, KV memory of a layer, attention out.

The contract only; must not choose a backend (see `select`) nor know a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.attention.capability import Capability
from headrace.types.cache_specs import GroupLayout


@dataclass
class LayerKv:
    """KV memory of one layer.

    Attributes:
        key: view [num_blocks, block_tokens, kv_heads, dim].
        value: view [num_blocks, block_tokens, kv_heads, dim].
        memory: the group's whole memory [num_blocks, layers, 2, block_tokens, kv_heads, dim]; a block is contiguous.
        place: index of the layer in ``memory``.
    """

    key: Tensor
    value: Tensor
    memory: Tensor
    place: int


@dataclass
class RowBatch:
    """Rows of one step in plan order; token t of row r has position ``starts[r] + t``.

    Attributes:
        starts: position of each row's first token.
        tokens: tokens of each row; their sum is T.
        block_tables: block ids of each row (group 0) from position 0; they cover the row's last token.
    """

    starts: list[int]
    tokens: list[int]
    block_tables: list[list[int]]


class AttentionStep(Protocol):
    """What a backend prepares once a step and reads in every layer."""

    @property
    def rows(self) -> int:
        """Rows of the step."""
        ...


class AttentionBackend(Protocol):
    """An implementation of paged causal attention."""

    name: str
    capability: Capability

    def allocate(self, group: GroupLayout, dtype: torch.dtype, device: torch.device) -> dict[int, LayerKv]:
        """Return zeroed KV memory for the layers of a group, by layer index. A block holds all layers contiguously."""
        ...

    def release(self) -> None:
        """Let go of the memory, so that another layout can be allocated. The model's views keep it until they go."""
        ...

    def prepare(self, batch: RowBatch) -> Any:
        """Return the `AttentionStep` of a step. Requires `allocate`."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv, step: Any, scale: float) -> Tensor:
        """Write k and v into the cache, then attend causally.

        Args:
            q: [T, heads, dim], rotated.
            k: [T, kv_heads, dim], rotated.
            v: [T, kv_heads, dim].
            kv: memory of the layer.
            step: from `prepare`.
            scale: factor on the scores.

        Returns:
            [T, heads, dim].

        Mutates:
            the slots of the step's tokens in ``kv``.
        """
        ...

    def observe(self, hidden: Tensor) -> None:
        """Look at the final hidden states [T, H]: non-finite ones mean that the cache now holds non-finite values."""
        ...

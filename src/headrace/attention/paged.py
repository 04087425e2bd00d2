"""What the backends that gather from block memory have in common: owning it, and knowing whether a value is not finite.

Must not compute attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.attention.contract import LayerKv
from headrace.attention.memory import BlockMemory
from headrace.base.errors import InvariantError, invariant
from headrace.types.cache_specs import GroupLayout


class PagedBackend:
    """Owner of one group's block memory; the backends add how they attend."""

    name = ""

    def __init__(self) -> None:
        self._memory: BlockMemory | None = None
        self._finite = True

    def allocate(self, group: GroupLayout, dtype: torch.dtype, device: torch.device) -> dict[int, LayerKv]:
        """See `AttentionBackend.allocate`."""
        invariant(self._memory is None, f"{self.name} serves one group")
        self._memory = BlockMemory(group, dtype, device)
        # On a GPU nobody looks at the values (that would be a synchronisation), so assume the worst.
        self._finite = device.type == "cpu"
        return self._memory.layer_kv()

    def release(self) -> None:
        """See `AttentionBackend.release`."""
        self._memory = None

    def observe(self, hidden: Tensor) -> None:
        """See `AttentionBackend.observe`."""
        if self._finite and not math.isfinite(hidden.sum().item()):
            self._finite = bool(torch.isfinite(hidden).all().item())

    def _require_memory(self) -> BlockMemory:
        if self._memory is None:
            raise InvariantError("attention memory is not allocated")
        return self._memory

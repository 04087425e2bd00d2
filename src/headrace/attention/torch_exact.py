"""Batch-invariant attention in fp32 on CPUs.

Every query token is an attention problem of its own with a fixed shape: the query heads of a group as rows, and keys
from position 0 to the end of the fixed key tile that holds the token. A token's bits then depend on its position and
its row's content only: not on other rows, on how the prompt was cut into chunks, or on what came from the prefix
cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.capability import TORCH_EXACT
from headrace.attention.contract import LayerKv, RowBatch
from headrace.attention.memory import BlockMemory
from headrace.attention.paged import PagedBackend
from headrace.base.errors import invariant
from headrace.types.cache_specs import GroupLayout

KV_TILE_TOKENS = 128
_ONE_CALL_TOKENS = 64


@dataclass
class Span:
    """Tokens whose last key lies in the same key tile.

    Attributes:
        places: slice of the T tokens, or [n] indices.
        rows: per layer, what to gather: one block table a token, or one for all of them.
        tables: number of block tables: n, or 1.
        mask: [n, 1, 1, S], 0 or -inf.
    """

    places: slice | Tensor
    rows: list[Tensor]
    tables: int
    mask: Tensor


@dataclass
class ExactStep:
    """What `TorchExact` prepares once a step.

    Attributes:
        rows: rows of the step.
        longest_tokens: length of the longest row.
        slots: per layer, where keys and where values go.
        spans: all tokens.
    """

    rows: int
    longest_tokens: int
    slots: list[tuple[Tensor, Tensor]]
    spans: list[Span]


class TorchExact(PagedBackend):
    """Backend "torch_exact"; see the module."""

    name = "torch_exact"
    capability = TORCH_EXACT

    def allocate(self, group: GroupLayout, dtype: torch.dtype, device: torch.device) -> dict[int, LayerKv]:
        """See `AttentionBackend.allocate`."""
        invariant(dtype == torch.float32 and device.type == "cpu", f"{self.name} is for float32 on a CPU")
        return super().allocate(group, dtype, device)

    def prepare(self, batch: RowBatch) -> ExactStep:
        """See `AttentionBackend.prepare`."""
        memory = self._require_memory()
        spans: list[Span] = []
        singles: dict[int, list[tuple[int, int]]] = {}
        first = 0
        for row, (start, tokens) in enumerate(zip(batch.starts, batch.tokens, strict=True)):
            if tokens == 1:
                singles.setdefault(start // KV_TILE_TOKENS, []).append((row, first))
            else:
                spans.extend(self._row_spans(memory, batch.block_tables[row], start, tokens, first))
            first += tokens
        for tile, members in singles.items():
            positions = torch.tensor([batch.starts[row] for row, _ in members])
            tables = [batch.block_tables[row] for row, _ in members]
            places = torch.tensor([place for _, place in members])
            spans.append(self._span(memory, places, positions, tables, tile))
        longest = max(start + tokens for start, tokens in zip(batch.starts, batch.tokens, strict=True))
        return ExactStep(len(batch.tokens), longest, memory.slot_rows(batch), spans)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv, step: ExactStep, scale: float) -> Tensor:
        """See `AttentionBackend.forward`."""
        memory = self._require_memory()
        memory.write(step.slots[kv.place], k, v)
        out = torch.empty_like(q)
        for span in step.spans:
            picked = q[span.places]
            gathered = memory.gather(span.rows[kv.place], span.tables)
            out[span.places] = self._attend(memory, picked, gathered[:, :, : span.mask.shape[-1]], span.mask, scale)
        return out

    def _attend(self, memory: BlockMemory, q: Tensor, gathered: Tensor, mask: Tensor, scale: float) -> Tensor:
        n = q.shape[0]
        keys, values = gathered.expand(-1, n, -1, -1, -1)
        if not self._finite:
            hidden = (mask != 0).view(n, -1, 1, 1)
            keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        grouped = q.view(n, memory.heads, -1, memory.dim)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
        )
        return out.reshape(q.shape)

    def _row_spans(self, memory: BlockMemory, table: list[int], start: int, tokens: int, first: int) -> list[Span]:
        spans = []
        position = start
        while position < start + tokens:
            tile = position // KV_TILE_TOKENS
            end = min(start + tokens, (tile + 1) * KV_TILE_TOKENS, position + _ONE_CALL_TOKENS)
            places = slice(first + position - start, first + end - start)
            spans.append(self._span(memory, places, torch.arange(position, end), [table], tile))
            position = end
        return spans

    def _span(
        self, memory: BlockMemory, places: slice | Tensor, positions: Tensor, tables: list[list[int]], tile: int
    ) -> Span:
        length = (tile + 1) * KV_TILE_TOKENS
        mask = torch.zeros(len(positions), length).masked_fill_(torch.arange(length) > positions[:, None], -math.inf)
        blocks = -(-length // memory.block_tokens)
        return Span(places, memory.table_rows(tables, blocks), len(tables), mask[:, None, None])

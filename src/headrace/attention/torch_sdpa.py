"""Fast attention from torch's operators: gather blocks, then scaled_dot_product_attention.

Decode rows go together, in buckets of similar length; the query heads of a group stand as query rows, so that a key
is read once for all of them (``enable_gqa`` would expand the keys). Rows of several tokens go one by one with a
causal mask. Not batch-invariant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.capability import TORCH_SDPA
from headrace.attention.contract import LayerKv, RowBatch
from headrace.attention.memory import BlockMemory
from headrace.attention.paged import PagedBackend

_BUCKET_SLACK = 1.5
_BUCKET_FLOOR_BLOCKS = 8


@dataclass
class DecodeBucket:
    """Decode rows of similar length.

    Attributes:
        places: [B] index of each row among the T tokens, or None if these are all T in order.
        rows: per layer, what to gather.
        mask: [B, 1, 1, S], 0 or -inf.
        size: B.
    """

    places: Tensor | None
    rows: list[Tensor]
    mask: Tensor
    size: int


@dataclass
class PrefillRow:
    """A row of several tokens.

    Attributes:
        first: index of its first token among T.
        tokens: n.
        length: start + n.
        rows: per layer, what to gather; None if the row starts at 0 and needs nothing from the cache.
        mask: [n, length], 0 or -inf; None if the row starts at 0.
    """

    first: int
    tokens: int
    length: int
    rows: list[Tensor] | None
    mask: Tensor | None


@dataclass
class SdpaStep:
    """What `TorchSdpa` prepares once a step.

    Attributes:
        rows: rows of the step.
        longest_tokens: length of the longest row.
        slots: per layer, where keys and where values go.
        buckets: decode rows.
        prefills: the others.
    """

    rows: int
    longest_tokens: int
    slots: list[tuple[Tensor, Tensor]]
    buckets: list[DecodeBucket]
    prefills: list[PrefillRow]


class TorchSdpa(PagedBackend):
    """Backend "torch_sdpa"; see the module."""

    name = "torch_sdpa"
    capability = TORCH_SDPA

    def prepare(self, batch: RowBatch) -> SdpaStep:
        """See `AttentionBackend.prepare`."""
        memory = self._require_memory()
        lengths = [start + tokens for start, tokens in zip(batch.starts, batch.tokens, strict=True)]
        firsts = [0]
        for tokens in batch.tokens:
            firsts.append(firsts[-1] + tokens)
        decodes = [row for row, tokens in enumerate(batch.tokens) if tokens == 1]
        prefills = [row for row, tokens in enumerate(batch.tokens) if tokens > 1]
        buckets = [
            self._bucket(memory, batch, rows, lengths, firsts)
            for rows in split_by_length(decodes, lengths, memory.block_tokens)
        ]
        return SdpaStep(
            rows=len(batch.tokens),
            longest_tokens=max(lengths),
            slots=memory.slot_rows(batch),
            buckets=buckets,
            prefills=[self._prefill(memory, batch, row, firsts[row]) for row in prefills],
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv, step: SdpaStep, scale: float) -> Tensor:
        """See `AttentionBackend.forward`."""
        memory = self._require_memory()
        memory.write(step.slots[kv.place], k, v)
        if len(step.buckets) == 1 and step.buckets[0].places is None:
            return self._decode(memory, q, step.buckets[0], kv.place, scale)
        out = torch.empty_like(q)
        for bucket in step.buckets:
            places = bucket.places
            picked = q if places is None else q.index_select(0, places)
            attended = self._decode(memory, picked, bucket, kv.place, scale)
            out.index_copy_(0, places, attended) if places is not None else out.copy_(attended)
        for row in step.prefills:
            part = slice(row.first, row.first + row.tokens)
            out[part] = self._attend_prefill(memory, q[part], k[part], v[part], row, kv.place, scale)
        return out

    def _decode(self, memory: BlockMemory, q: Tensor, bucket: DecodeBucket, place: int, scale: float) -> Tensor:
        keys, values = memory.gather(bucket.rows[place], bucket.size)
        if not self._finite:
            hidden = (bucket.mask != 0).view(bucket.size, -1, 1, 1)
            keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        grouped = q.view(bucket.size, memory.heads, -1, memory.dim).to(memory.dtype)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bucket.mask, scale=scale
        )
        return out.reshape(q.shape).to(q.dtype)

    def _attend_prefill(
        self, memory: BlockMemory, q: Tensor, k: Tensor, v: Tensor, row: PrefillRow, place: int, scale: float
    ) -> Tensor:
        if row.rows is not None:
            gathered = memory.gather(row.rows[place], 1)
            k, v = gathered[0, 0, : row.length], gathered[1, 0, : row.length]
            q = q.to(memory.dtype)
        n, heads, dim = q.shape
        group = heads // memory.heads
        grouped = q.view(n, memory.heads, group, dim).permute(1, 2, 0, 3)
        keys = k.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        values = v.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        causal = row.mask is None
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=row.mask, is_causal=causal, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(n, heads, dim)

    def _bucket(
        self, memory: BlockMemory, batch: RowBatch, rows: list[int], lengths: list[int], firsts: list[int]
    ) -> DecodeBucket:
        blocks = max(-(-lengths[row] // memory.block_tokens) for row in rows)
        span = torch.arange(blocks * memory.block_tokens)
        ends = torch.tensor([lengths[row] for row in rows])
        mask = torch.zeros(len(rows), len(span), dtype=memory.dtype).masked_fill_(span >= ends[:, None], -math.inf)
        everything = len(rows) == firsts[-1]
        places = None if everything and rows == list(range(len(rows))) else torch.tensor([firsts[row] for row in rows])
        return DecodeBucket(
            places=None if places is None else places.to(memory.device),
            rows=memory.table_rows([batch.block_tables[row] for row in rows], blocks),
            mask=mask[:, None, None].to(memory.device),
            size=len(rows),
        )

    def _prefill(self, memory: BlockMemory, batch: RowBatch, row: int, first: int) -> PrefillRow:
        start, tokens = batch.starts[row], batch.tokens[row]
        length = start + tokens
        if start == 0:
            return PrefillRow(first, tokens, length, None, None)
        blocks = -(-length // memory.block_tokens)
        hidden = torch.arange(length)[None, :] > torch.arange(start, length)[:, None]
        mask = torch.zeros(tokens, length, dtype=memory.dtype).masked_fill_(hidden, -math.inf)
        rows = memory.table_rows([batch.block_tables[row]], blocks)
        return PrefillRow(first, tokens, length, rows, mask.to(memory.device))


def split_by_length(rows: list[int], lengths: list[int], block_tokens: int) -> list[list[int]]:
    """Split decode rows into buckets whose rows do not differ much in length, so that padding stays bounded.

    Args:
        rows: indices of decode rows.
        lengths: of all rows of the step, in tokens.
        block_tokens: tokens of a block.

    Returns:
        Buckets in ascending length; one bucket keeps the order of ``rows``.
    """
    if not rows:
        return []
    blocks = {row: -(-lengths[row] // block_tokens) for row in rows}
    if max(blocks.values()) <= _limit(min(blocks.values())):
        return [rows]
    buckets: list[list[int]] = []
    limit = 0
    for row in sorted(rows, key=lambda r: (blocks[r], r)):
        if not buckets or blocks[row] > limit:
            buckets.append([])
            limit = _limit(blocks[row])
        buckets[-1].append(row)
    return buckets


def _limit(blocks: int) -> int:
    return max(_BUCKET_FLOOR_BLOCKS, int(blocks * _BUCKET_SLACK))

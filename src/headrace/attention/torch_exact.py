"""Batch-invariant attention in fp32 on CPUs.

Every query token is an attention problem of its own with a fixed shape: the query heads of a group as rows, and keys
from the start of the fixed key tile that holds the first key it reads to the end of the one that holds the token. A
token's bits then depend on its position and its row's content only: not on other rows, on how the prompt was cut into
chunks, or on what came from the prefix cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.capability import TORCH_EXACT
from headrace.attention.contract import Ints, RowBatch, Scoring
from headrace.attention.memory import BlockMemory, Read
from headrace.attention.paged import scored_attention
from headrace.base.errors import invariant

KV_TILE_TOKENS = 128
_ONE_CALL_TOKENS = 64


@dataclass
class Span:
    """Tokens whose first keys lie in one key tile, and whose last keys lie in one.

    Attributes:
        places: slice of the T tokens, or [n] indices.
        read: what to gather: one block table a token, or one for all of them.
        skip: gathered tokens in front of the first tile.
        mask: [n, 1, 1, S], 0 or -inf.
    """

    places: slice | Tensor
    read: Read
    skip: int
    mask: Tensor


@dataclass
class ExactStep:
    """What `TorchExact` prepares once a step.

    Attributes:
        slots: where keys and where values go.
        spans: all tokens.
    """

    slots: tuple[Tensor, Tensor]
    spans: list[Span]


class TorchExact:
    """Backend "torch_exact"; see the module.

    Args:
        memory: of the group; float32 on a CPU.
    """

    name = "torch_exact"
    capability = TORCH_EXACT

    def __init__(self, memory: BlockMemory) -> None:
        fits = memory.dtype == torch.float32 and memory.device.type == "cpu"
        invariant(fits, f"{self.name} is for float32 on a CPU")
        self._memory = memory

    def prepare(self, batch: RowBatch) -> ExactStep:
        """See `AttentionBackend.prepare`."""
        slots = self._memory.slot_rows(batch)
        firsts = batch.tokens.cumsum() - batch.tokens
        spans = self._single_spans(batch, firsts)
        for row in np.flatnonzero(batch.tokens > 1).tolist():
            spans.extend(self._row_spans(batch, row, int(firsts[row])))
        return ExactStep(slots, spans)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, place: int, prepared: ExactStep, scoring: Scoring
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        if k is not None and v is not None:
            self._memory.write(place, prepared.slots, k, v)
        out = torch.empty_like(q)
        for span in prepared.spans:
            gathered = self._memory.gather(place, span.read)
            gathered = gathered[:, :, span.skip : span.skip + span.mask.shape[-1]]
            out[span.places] = self._attend(q[span.places], gathered, span.mask, scoring)
        return out

    def _attend(self, q: Tensor, gathered: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
        n = q.shape[0]
        keys, values = gathered.expand(-1, n, -1, -1, -1).transpose(2, 3).unbind(0)
        grouped = q.view(n, self._memory.heads, -1, self._memory.dim)
        if scoring.plain:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scoring.scale)
            return out.reshape(q.shape)
        # A product of matrices may round otherwise in a larger batch, so each token has its own.
        parts = [
            scored_attention(grouped[i, :, :, None], keys[i, :, None], values[i, :, None], mask[i], scoring)
            for i in range(n)
        ]
        return torch.stack(parts).reshape(q.shape)

    def _single_spans(self, batch: RowBatch, firsts: Ints) -> list[Span]:
        rows = np.flatnonzero(batch.tokens == 1)
        positions = batch.starts[rows]
        tiles = np.stack((self._memory.reach.first(positions), positions), axis=1) // KV_TILE_TOKENS
        spans = []
        for low, high in sorted(set(map(tuple, tiles.tolist()))):
            members = (tiles == (low, high)).all(axis=1)
            places = torch.from_numpy(firsts[rows[members]])
            spans.append(self._span(batch, places, rows[members], positions[members], (low, high)))
        return spans

    def _row_spans(self, batch: RowBatch, row: int, first: int) -> list[Span]:
        start = int(batch.starts[row])
        positions = np.arange(start, start + int(batch.tokens[row]))
        tiles = np.stack((self._memory.reach.first(positions), positions), axis=1) // KV_TILE_TOKENS
        cuts = np.flatnonzero((tiles[1:] != tiles[:-1]).any(axis=1)) + 1
        spans = []
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(positions)], strict=True):
            for low in range(begin, end, _ONE_CALL_TOKENS):
                high = min(low + _ONE_CALL_TOKENS, end)
                tile = (int(tiles[low, 0]), int(tiles[low, 1]))
                places = slice(first + low, first + high)
                spans.append(self._span(batch, places, np.array([row]), positions[low:high], tile))
        return spans

    def _span(
        self, batch: RowBatch, places: slice | Tensor, rows: Ints, positions: Ints, tiles: tuple[int, int]
    ) -> Span:
        memory = self._memory
        begin, end = tiles[0] * KV_TILE_TOKENS, (tiles[1] + 1) * KV_TILE_TOKENS
        base = begin // memory.block_tokens
        blocks = -(-end // memory.block_tokens) - base
        firsts = memory.reach.first(positions)
        if len(rows) == len(positions):
            needed, last = firsts, positions
        else:
            # One table serves all: the row's tokens follow one another.
            needed, last = firsts[:1], positions[-1:]
        read = memory.read(batch, rows, np.full(len(rows), base), blocks, needed, last)
        keys = np.arange(begin, end)
        hidden = (keys > positions[:, None]) | (keys < firsts[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -math.inf)
        return Span(places, read, begin - base * memory.block_tokens, mask[:, None, None])

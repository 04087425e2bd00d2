"""Fast attention from torch's operators: gather blocks, then scaled_dot_product_attention.

Decode rows go together, in buckets of similar length; the query heads of a group stand as query rows, so that a key
is read once for all of them (``enable_gqa`` would expand the keys). Rows of several tokens go one by one, in pieces
that read no more keys than they see. Not batch-invariant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.capability import TORCH_SDPA
from headrace.attention.contract import Ints, RowBatch, Scoring
from headrace.attention.memory import BlockMemory, Read
from headrace.attention.paged import scored_attention

_BUCKET_SLACK = 1.5
_BUCKET_FLOOR_BLOCKS = 8
_PIECE_TOKENS = 512


@dataclass
class DecodeBucket:
    """Decode rows that read similarly many blocks.

    Attributes:
        places: [B] index of each row among the T tokens, or None if these are all T in order.
        read: what to gather.
        mask: [B, 1, 1, S], 0 or -inf.
    """

    places: Tensor | None
    read: Read
    mask: Tensor


@dataclass
class Piece:
    """Consecutive query tokens of a row and the keys that they see.

    Attributes:
        begin: first query among the row's tokens.
        end: behind the last query.
        key_begin: position of the first key.
        key_end: behind the last key.
        mask: [n, keys], 0 or -inf; None if queries and keys are the same tokens and each sees all before it.
    """

    begin: int
    end: int
    key_begin: int
    key_end: int
    mask: Tensor | None


@dataclass
class PrefillRow:
    """A row of several tokens.

    Attributes:
        first: index of its first token among T.
        start: position of its first token.
        tokens: n.
        fresh: True if it needs no key from before ``start`` and no mask: the step's own keys do.
        read: what to gather.
        origin: position of the first gathered token.
        pieces: all its tokens.
    """

    first: int
    start: int
    tokens: int
    fresh: bool
    read: Read
    origin: int
    pieces: list[Piece]


@dataclass
class SdpaStep:
    """What `TorchSdpa` prepares once a step.

    Attributes:
        slots: where keys and where values go.
        buckets: decode rows.
        prefills: the others.
    """

    slots: tuple[Tensor, Tensor]
    buckets: list[DecodeBucket]
    prefills: list[PrefillRow]


class TorchSdpa:
    """Backend "torch_sdpa"; see the module.

    Args:
        memory: of the group.
    """

    name = "torch_sdpa"
    capability = TORCH_SDPA

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory

    def prepare(self, batch: RowBatch) -> SdpaStep:
        """See `AttentionBackend.prepare`."""
        slots = self._memory.slot_rows(batch)
        firsts = batch.tokens.cumsum() - batch.tokens
        decodes = np.flatnonzero(batch.tokens == 1)
        positions = batch.starts[decodes]
        base = self._memory.reach.first(positions) // self._memory.block_tokens
        blocks = positions // self._memory.block_tokens + 1 - base
        return SdpaStep(
            slots=slots,
            buckets=[
                self._bucket(batch, decodes[members], base[members], int(blocks[members].max()), firsts)
                for members in split_by_length(blocks)
            ],
            prefills=[self._prefill(batch, row, int(firsts[row])) for row in np.flatnonzero(batch.tokens > 1).tolist()],
        )

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, place: int, prepared: SdpaStep, scoring: Scoring
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        if k is not None and v is not None:
            self._memory.write(place, prepared.slots, k, v)
        if len(prepared.buckets) == 1 and prepared.buckets[0].places is None:
            return self._decode(q, prepared.buckets[0], place, scoring)
        out = torch.empty_like(q)
        for bucket in prepared.buckets:
            places = bucket.places
            attended = self._decode(q if places is None else q.index_select(0, places), bucket, place, scoring)
            out.index_copy_(0, places, attended) if places is not None else out.copy_(attended)
        for row in prepared.prefills:
            part = slice(row.first, row.first + row.tokens)
            own = (k[part], v[part]) if row.fresh and k is not None and v is not None else None
            out[part] = self._attend_row(q[part], own, row, place, scoring)
        return out

    def _decode(self, q: Tensor, bucket: DecodeBucket, place: int, scoring: Scoring) -> Tensor:
        memory, size = self._memory, bucket.read.tables
        keys, values = memory.gather(place, bucket.read).transpose(2, 3).unbind(0)
        grouped = q.view(size, memory.heads, -1, memory.dim).to(memory.dtype)
        if scoring.plain:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask, scale=scoring.scale)
        else:
            mask = bucket.mask[:, None]
            out = scored_attention(grouped[..., None, :], keys[:, :, None], values[:, :, None], mask, scoring)
        return out.reshape(q.shape).to(q.dtype)

    def _attend_row(
        self, q: Tensor, own: tuple[Tensor, Tensor] | None, row: PrefillRow, place: int, scoring: Scoring
    ) -> Tensor:
        n, heads, dim = q.shape
        if own is None:
            k, v = self._memory.gather(place, row.read)[:, 0].unbind(0)
            origin, cast = row.origin, q.to(self._memory.dtype)
        else:
            k, v = own
            origin, cast = row.start, q
        group = heads // self._memory.heads
        grouped = cast.view(n, self._memory.heads, group, dim).permute(1, 2, 0, 3)
        keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
        parts = []
        for piece in row.pieces:
            seen = slice(piece.key_begin - origin, piece.key_end - origin)
            parts.append(
                _attend_piece(
                    grouped[:, :, piece.begin : piece.end], keys[:, :, seen], values[:, :, seen], piece, scoring
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return out.permute(2, 0, 1, 3).reshape(n, heads, dim)

    def _bucket(self, batch: RowBatch, rows: Ints, base: Ints, blocks: int, firsts: Ints) -> DecodeBucket:
        memory = self._memory
        positions = batch.starts[rows]
        reach = memory.reach.first(positions)
        keys = np.arange(blocks * memory.block_tokens) + (base * memory.block_tokens)[:, None]
        hidden = keys > positions[:, None]
        if memory.reach.bounded:
            hidden |= keys < reach[:, None]
        everything = len(rows) == len(batch.tokens) and bool((rows[1:] > rows[:-1]).all())
        return DecodeBucket(
            places=None if everything else torch.from_numpy(firsts[rows]).to(memory.device),
            read=memory.read(batch, rows, base, blocks, reach, positions),
            mask=_mask(hidden, memory)[:, None, None],
        )

    def _prefill(self, batch: RowBatch, row: int, first: int) -> PrefillRow:
        memory = self._memory
        start, tokens = int(batch.starts[row]), int(batch.tokens[row])
        positions = np.arange(start, start + tokens)
        reach = memory.reach.first(positions)
        base = reach[:1] // memory.block_tokens
        blocks = (start + tokens - 1) // memory.block_tokens + 1 - int(base[0])
        pieces = _pieces(positions, reach, memory)
        return PrefillRow(
            first=first,
            start=start,
            tokens=tokens,
            fresh=all(piece.mask is None for piece in pieces),
            read=memory.read(batch, np.array([row]), base, blocks, reach[:1], positions[-1:]),
            origin=int(base[0]) * memory.block_tokens,
            pieces=pieces,
        )


def _pieces(positions: Ints, reach: Ints, memory: BlockMemory) -> list[Piece]:
    pieces: list[Piece] = []
    start, begin = int(positions[0]), 0
    while begin < len(positions):
        key_begin = int(reach[begin])
        if key_begin == start + begin:
            # A position that sees nothing before itself: as far as this holds for all, the mask is a plain triangle.
            end = int(np.searchsorted(reach, key_begin, side="right"))
            pieces.append(Piece(begin, end, key_begin, start + end, None))
        else:
            end = min(begin + _PIECE_TOKENS, len(positions))
            keys = np.arange(key_begin, start + end)
            hidden = (keys > positions[begin:end, None]) | (keys < reach[begin:end, None])
            pieces.append(Piece(begin, end, key_begin, start + end, _mask(hidden, memory)))
        begin = end
    return pieces


def _mask(hidden: npt.NDArray[np.bool_], memory: BlockMemory) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=memory.dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), -math.inf).to(memory.device)


def _attend_piece(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scoring: Scoring) -> Tensor:
    """Attend q [kv_heads, group, n, D] to k, v [kv_heads, 1, keys, D]."""
    if not scoring.plain:
        mask = piece.mask
        if mask is None:
            n = q.shape[2]
            mask = torch.full((n, n), -math.inf, device=q.device).triu_(1)
        return scored_attention(q, k, v, mask, scoring)
    wide = (q.shape[0], q.shape[1], *k.shape[2:])
    return F.scaled_dot_product_attention(
        q, k.expand(wide), v.expand(wide), attn_mask=piece.mask, is_causal=piece.mask is None, scale=scoring.scale
    )


def split_by_length(blocks: Ints) -> list[Ints]:
    """Split decode rows into buckets that do not differ much in length, so that padding stays bounded.

    Args:
        blocks: [n] blocks that each row reads.

    Returns:
        Indices into ``blocks``, buckets in ascending length; one bucket keeps the order.
    """
    if not len(blocks):
        return []
    if blocks.max() <= _limit(int(blocks.min())):
        return [np.arange(len(blocks))]
    order = np.argsort(blocks, kind="stable")
    cuts, limit = [], _limit(int(blocks[order[0]]))
    for place, count in enumerate(blocks[order].tolist()):
        if count > limit:
            cuts.append(place)
            limit = _limit(count)
    return np.split(order, cuts)


def _limit(blocks: int) -> int:
    return max(_BUCKET_FLOOR_BLOCKS, int(blocks * _BUCKET_SLACK))

"""What a model declares about each layer's cache. Nobody inspects model classes; this is all that `kv` sees.

One struct a kind. A layer may declare several parts (a compressed layer keeps records, index keys, and a small window
of raw tokens). Layers and parts with equal specs form a group. Must not know how memory is divided beyond `KvLayout`.
"""

from __future__ import annotations

import math

import msgspec


class FullAttentionSpec(msgspec.Struct, frozen=True, array_like=True, tag="full"):
    """Keys and values of every token are kept.

    Attributes:
        kv_heads: KV heads **on this rank**.
        key_dim: elements of a key vector.
        value_dim: elements of a value vector.
        dtype_bytes: bytes of one element.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int

    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` tokens."""
        return block_tokens * self.token_bytes()


class SlidingWindowSpec(msgspec.Struct, frozen=True, array_like=True, tag="sliding"):
    """Keys and values of the last ``window_tokens`` tokens are kept: position p reads p - window_tokens + 1 to p.

    Attributes:
        kv_heads: KV heads **on this rank**.
        key_dim: elements of a key vector.
        value_dim: elements of a value vector; may be 0 (raw records).
        dtype_bytes: bytes of one element.
        window_tokens: tokens that a position reads, itself included; at least 1.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int
    window_tokens: int

    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` tokens."""
        return block_tokens * self.token_bytes()


class ChunkedLocalSpec(msgspec.Struct, frozen=True, array_like=True, tag="chunked"):
    """A token reads the tokens of its own chunk up to itself; chunk i is [i * chunk_tokens, (i + 1) * chunk_tokens).

    Attributes:
        kv_heads: KV heads **on this rank**.
        key_dim: elements of a key vector.
        value_dim: elements of a value vector.
        dtype_bytes: bytes of one element.
        chunk_tokens: at least 1.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int
    chunk_tokens: int

    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` tokens."""
        return block_tokens * self.token_bytes()


class LatentSpec(msgspec.Struct, frozen=True, array_like=True, tag="latent"):
    """One record a token stands for keys and values of all heads (MLA). The same on every rank.

    Attributes:
        record_bytes: bytes of one record (576 bf16 values are 1,152).
    """

    record_bytes: int

    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer."""
        return self.record_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` tokens."""
        return block_tokens * self.record_bytes


class CompressedSpec(msgspec.Struct, frozen=True, array_like=True, tag="compressed"):
    """One record for every ``ratio_tokens`` tokens, written when the last of them is computed.

    The raw tokens of the unfinished window are another part of the layer, a `SlidingWindowSpec`.

    Attributes:
        record_bytes: bytes of one record.
        ratio_tokens: tokens that a record stands for; a block must be a multiple of it.
    """

    record_bytes: int
    ratio_tokens: int

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` tokens."""
        return block_tokens // self.ratio_tokens * self.record_bytes


class IndexKeysSpec(msgspec.Struct, frozen=True, array_like=True, tag="index"):
    """Keys by which a sparse layer chooses what it reads; one for every ``ratio_tokens`` tokens.

    Attributes:
        record_bytes: bytes of one key with its scale.
        ratio_tokens: tokens that a key stands for, 1 without compression; a block must be a multiple of it.
    """

    record_bytes: int
    ratio_tokens: int = 1

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` tokens."""
        return block_tokens // self.ratio_tokens * self.record_bytes


class StatePart(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a recurrent state.

    Attributes:
        name: for the layer that owns it ("conv", "state").
        shape: of one request, on this rank.
        dtype_bytes: bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    dtype_bytes: int

    def part_bytes(self) -> int:
        """Bytes of the tensor, padded to 16 so that the next part is aligned."""
        return -(-math.prod(self.shape) * self.dtype_bytes // 16) * 16


class RecurrentSpec(msgspec.Struct, frozen=True, array_like=True, tag="recurrent"):
    """A state of fixed size that every token overwrites (Mamba, GDN, KDA, causal convolutions).

    A request has one working state; copies of it at some boundaries (checkpoints) are what can be hit.

    Attributes:
        parts: tensors of the state, one after the other in memory.
    """

    parts: tuple[StatePart, ...]

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's state; it does not depend on ``block_tokens``."""
        return sum(part.part_bytes() for part in self.parts)


class SharedSpec(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """The layer reads the cache of another layer and keeps nothing of its own.

    Attributes:
        source_layer: index of the layer whose cache it reads; that one is not shared itself.
    """

    source_layer: int

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of its own: none."""
        return 0


class CrossAttentionSpec(msgspec.Struct, frozen=True, array_like=True, tag="cross"):
    """Keys and values of the encoder's tokens: written once, read by every decoder token, never reused by others.

    Attributes:
        kv_heads: KV heads **on this rank**.
        key_dim: elements of a key vector.
        value_dim: elements of a value vector.
        dtype_bytes: bytes of one element.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int

    def token_bytes(self) -> int:
        """Bytes that one encoder token takes in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer's part of a block of ``block_tokens`` encoder tokens."""
        return block_tokens * self.token_bytes()


class NoCacheSpec(msgspec.Struct, frozen=True, array_like=True, tag="none"):
    """The layer keeps nothing (encoder-only layers, pooling models)."""

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes: none."""
        return 0


CacheSpec = (
    FullAttentionSpec
    | SlidingWindowSpec
    | ChunkedLocalSpec
    | LatentSpec
    | CompressedSpec
    | IndexKeysSpec
    | RecurrentSpec
    | SharedSpec
    | CrossAttentionSpec
    | NoCacheSpec
)


def kind_of(spec: CacheSpec) -> str:
    """Return the name of a spec's kind, as on the wire: "full", "sliding" and so on."""
    return str(spec.__struct_config__.tag)


class LayerCache(msgspec.Struct, frozen=True, array_like=True):
    """Cache declaration of one layer, or of one part of it.

    Attributes:
        layer_index: position in the model.
        spec: what the layer keeps.
        part: names the part if a layer declares several; (layer_index, part) is unique.
    """

    layer_index: int
    spec: CacheSpec
    part: str = "kv"


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share one cache spec and one block table.

    Attributes:
        group: index of the group, from 0.
        spec: the common spec.
        layer_indices: layers of the group, ascending; a block holds their parts in this order, contiguously.
        block_tokens: tokens in one block; 0 for a recurrent group, whose block is one state.
        num_blocks: most blocks that the group can ever hold, the null block included.
        block_granules: granules of one block, padding included. A block's id is the offset of its first granule.
        parts: of each layer, its `LayerCache.part`; empty if all are "kv".
    """

    group: int
    spec: CacheSpec
    layer_indices: list[int]
    block_tokens: int
    num_blocks: int
    block_granules: int = 1
    parts: list[str] = []

    def block_bytes(self) -> int:
        """Bytes of one block without padding: all layers of the group on this rank."""
        return self.spec.block_bytes(self.block_tokens) * len(self.layer_indices)


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """The whole KV memory of one rank: the same block ids on every rank.

    Memory is a row of granules. The first ``null_granules`` are the null block of every group. The rest is cut into
    extents of ``extent_granules``; an extent belongs to one group at a time, or to none. A layout with one group may
    have a single extent.

    Attributes:
        groups: shared, cross-free and cache-free layers included only where they take memory; may be empty.
        granule_bytes: bytes of a granule. 0, as in messages of an older engine, is refused by whoever makes memory.
        extent_granules: granules of one extent.
        num_extents: extents.
        shared_layers: (layer, layer whose cache it reads) of `SharedSpec`.
    """

    groups: list[GroupLayout]
    granule_bytes: int = 0
    extent_granules: int = 0
    num_extents: int = 0
    shared_layers: list[tuple[int, int]] = []

    @property
    def null_granules(self) -> int:
        """Granules at the start that no block uses: the null block of the group with the largest blocks."""
        return max((group.block_granules for group in self.groups), default=0)

    def total_bytes(self) -> int:
        """Bytes of the whole memory, padding and null blocks included."""
        return self.granule_bytes * (self.null_granules + self.extent_granules * self.num_extents)

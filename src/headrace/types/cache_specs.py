"""What a model declares about each layer's cache. Nobody inspects model classes; this is all that `kv` sees.

The first kind is full attention. Further kinds are further structs of the same union.
"""

from __future__ import annotations

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


CacheSpec = FullAttentionSpec


class LayerCache(msgspec.Struct, frozen=True, array_like=True):
    """Cache declaration of one layer.

    Attributes:
        layer_index: position in the model.
        spec: what the layer keeps.
    """

    layer_index: int
    spec: CacheSpec


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share one cache spec and one block table, and the memory they get.

    Attributes:
        group: index of the group, from 0.
        spec: the common spec.
        layer_indices: layers of the group, ascending.
        block_tokens: tokens in one block.
        num_blocks: blocks of the group, block 0 (the null block) included.
    """

    group: int
    spec: CacheSpec
    layer_indices: list[int]
    block_tokens: int
    num_blocks: int

    def block_bytes(self) -> int:
        """Bytes of one block: all layers of the group on this rank."""
        return self.block_tokens * self.spec.token_bytes() * len(self.layer_indices)


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """The whole KV memory of one rank: the same block ids on every rank."""

    groups: list[GroupLayout]

    def total_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.block_bytes() * group.num_blocks for group in self.groups)

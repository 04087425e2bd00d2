"""Groups with published blocks, for the tests of the kinds."""

from __future__ import annotations

from kv_oracle import Spec, layout_of

from headrace.kv.groups import CacheGroup, make_group
from headrace.kv.memory import KvMemory


def hash_of(tokens: int) -> bytes:
    return b"%d" % tokens


def make(spec: Spec, block_tokens: int = 4, hash_tokens: int | None = None, usable: int = 16) -> CacheGroup:
    layout = layout_of((spec, block_tokens, usable))
    return make_group(layout.groups[0], KvMemory(layout).pools[0], hash_tokens=hash_tokens or block_tokens)


def filled(group: CacheGroup, hash_tokens: int, tokens: int, *, without: tuple[int, ...] = ()) -> list[int]:
    """Publish the first ``tokens`` tokens; ``without`` are block places that are missing."""
    table: list[int] = []
    group.allocate(table, -(-tokens // group.block_tokens))
    for boundary in range(hash_tokens, tokens + 1, hash_tokens):
        place = (boundary - 1) // group.block_tokens
        if place not in without:
            group.pool.publish(table[place], hash_of(boundary), parent_hash=None, token_ids=[])
    return table


def hashes(hash_tokens: int, tokens: int) -> list[bytes]:
    return [hash_of(boundary) for boundary in range(hash_tokens, tokens + 1, hash_tokens)]

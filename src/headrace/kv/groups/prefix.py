"""The search that all groups share which keep every token: the longest beginning, left to right.

Must not be used for groups that free what falls behind: they need other blocks for another length.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kv.groups.base import GroupHit, TokenGroup


def longest_prefix(
    group: TokenGroup, hashes: Sequence[bytes], max_tokens: int, longer: GroupHit | None, record_tokens: int = 1
) -> GroupHit:
    """Find the longest beginning of which every record is cached.

    Args:
        group: keeps one record for every ``record_tokens`` tokens, from position 0.
        hashes: prefix hashes of the sequence.
        max_tokens: no hit may be longer; a multiple of the hash unit.
        longer: the group's longest hit at a larger ``max_tokens``, to be cut.
        record_tokens: tokens that a record stands for; divides the block. A hit that ends inside a record needs only
            the records before that one: the tokens of the unfinished one are kept by another group.
    """
    if longer is not None:
        return _cut(longer, max_tokens, group.block_tokens, record_tokens)
    block_tokens, unit = group.block_tokens, group.hash_tokens
    stride = block_tokens // unit
    table = group.pool.find_run(hashes[stride - 1 : max_tokens // block_tokens * stride : stride])
    start = len(table) * block_tokens
    most_tokens = min(max_tokens, start + block_tokens - unit)
    records, tail = 0, None
    for boundary in range(most_tokens, start + record_tokens - 1, -unit):
        tail = group.find(hashes, boundary)
        if tail is not None:
            records = (boundary - start) // record_tokens
            break
    end = start + (records + 1) * record_tokens - 1
    return GroupHit(min(most_tokens, end - end % unit), table, tail)


def _cut(longer: GroupHit, max_tokens: int, block_tokens: int, record_tokens: int) -> GroupHit:
    if max_tokens >= longer.tokens:
        return longer
    full = max_tokens // block_tokens
    table = longer.table[:full]
    if (max_tokens - full * block_tokens) // record_tokens == 0:
        return GroupHit(max_tokens, table)
    return GroupHit(max_tokens, table, longer.table[full] if full < len(longer.table) else longer.tail)

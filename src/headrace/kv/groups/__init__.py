"""One module a kind of cache spec: how a group of layers finds hits, grows, and frees what it no longer reads.

Must not look at other groups; that is the coordinator's work.
"""

from __future__ import annotations

from headrace.kv.groups.base import CacheGroup
from headrace.kv.groups.full import FullGroup
from headrace.types.cache_specs import GroupLayout


def make_group(layout: GroupLayout, *, hash_tokens: int, record_events: bool) -> CacheGroup:
    """Return the manager of a group, chosen by the kind of its spec.

    Args:
        layout: of the group.
        hash_tokens: tokens under one prefix hash; divides the group's block.
        record_events: record cache events in the group's pool.
    """
    return FullGroup(layout, hash_tokens=hash_tokens, record_events=record_events)


__all__ = ["CacheGroup", "FullGroup", "make_group"]

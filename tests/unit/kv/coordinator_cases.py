"""Coordinators over small memories, and sequences that have computed something, for the coordinator's tests."""

from __future__ import annotations

from kv_oracle import Spec, full, layout_of

from headrace.base.ids import BlockId
from headrace.kv.coordinator import Hit, KvCoordinator, SequenceKv
from headrace.kv.prefix_hash import HashExtras

TOKENS = list(range(100, 200))


def make_kv(*groups: tuple[Spec, int, int], caching: bool = True, **options: object) -> KvCoordinator:
    """Return a coordinator; a group is (spec, tokens in a block, usable blocks)."""
    given = {"batch_tokens": 100, "record_events": True, **options}
    return KvCoordinator(layout_of(*groups), enable_prefix_caching=caching, **given)  # type: ignore[arg-type]


def full_kv(*groups: tuple[int, int], caching: bool = True, **options: object) -> KvCoordinator:
    """Return a coordinator over full groups of (tokens in a block, usable blocks)."""
    specs = [(full(index + 1), block_tokens, usable) for index, (block_tokens, usable) in enumerate(groups)]
    return make_kv(*specs, caching=caching, **options)


def new(kv: KvCoordinator, prompt_tokens: int = 100, salt: str | None = None, **given: object) -> SequenceKv:
    return kv.new_sequence(extras=HashExtras(salt=salt), prompt_tokens=prompt_tokens, **given)  # type: ignore[arg-type]


def computed(
    kv: KvCoordinator, token_ids: list[int], tokens: int, salt: str | None = None, prompt_tokens: int = 100
) -> SequenceKv:
    """Start a sequence without a hit and apply its first ``tokens`` tokens; save what is worth saving."""
    sequence = new(kv, prompt_tokens, salt)
    kv.start(sequence, kv.no_hit(), tokens)
    planned = 0
    while planned < tokens:
        planned = kv.next_stop(sequence, planned, tokens)
        kv.plan_saves(sequence, planned)
        kv.advance(sequence, token_ids, planned)
    return sequence


def find(kv: KvCoordinator, token_ids: list[int], salt: str | None = None) -> Hit:
    return kv.find_hit(new(kv, salt=salt), token_ids)


def free_of(kv: KvCoordinator) -> list[int]:
    return [pool.free_blocks for pool in kv.memory.pools]


def held(table: list[BlockId]) -> int:
    return len(table) - table.count(BlockId(0))

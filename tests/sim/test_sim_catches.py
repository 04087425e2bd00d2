"""The simulation is worth its time only if it notices mistakes: each of these is planted, and must be found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.kv import coordinator
from headrace.kv.coordinator import KvCoordinator, SequenceKv
from headrace.kv.groups import FullGroup
from headrace.kv.pool import BlockPool
from headrace.kv.prefix_hash import extend_block_hashes
from headrace.sched.draft import StepDraft
from headrace.sched.scheduler import Scheduler
from headrace.sim.swarm import run_seed

SEEDS = 150


def first_failure() -> int | None:
    for seed in range(SEEDS):
        try:
            run_seed(seed)
        except Exception:
            return seed
    return None


def plant_off_by_one_in_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullGroup, "blocks_needed", lambda self, blocks, tokens: max(0, tokens // self.block_tokens - blocks))


def plant_hit_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "touch", lambda self, blocks: None)


def plant_published_one_token_early(patch: pytest.MonkeyPatch) -> None:
    right = KvCoordinator.advance

    def wrong(self: KvCoordinator, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        right(self, sequence, token_ids, min(computed_tokens + 1, len(token_ids)))

    patch.setattr(KvCoordinator, "advance", wrong)


def plant_salt_forgotten(patch: pytest.MonkeyPatch) -> None:
    def wrong(hashes: list[bytes], token_ids: Sequence[int], block_tokens: int, **given: object) -> None:
        extend_block_hashes(hashes, token_ids, block_tokens)

    patch.setattr(coordinator, "extend_block_hashes", wrong)


def plant_reused_block_keeps_its_hash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_unpublish", lambda self, block: None)


def plant_victim_stays_in_the_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepDraft, "remove", lambda self, request: None)


def plant_freed_while_running(patch: pytest.MonkeyPatch) -> None:
    right = KvCoordinator.advance

    def wrong(self: KvCoordinator, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        right(self, sequence, token_ids, computed_tokens)
        self.groups[0].pool.free(sequence.tables[0][:1])

    patch.setattr(KvCoordinator, "advance", wrong)


def plant_idle_hits_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "idle", lambda self, blocks: 0)


def plant_admission_too_timid(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler._promised_blocks
    patch.setattr(Scheduler, "_promised_blocks", lambda self: [kept + 2 for kept in right(self)])


PLANTS = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(plant)
    plant(monkeypatch)
    assert first_failure() is not None, f"{SEEDS} seeds passed although the code is wrong"

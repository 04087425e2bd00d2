"""The simulation is worth its time only if it notices mistakes: each of these is planted, and must be found.

The mutants of ``tools/`` are many more; these few run with every test run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.base.ids import BlockId
from headrace.kv import publication
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.groups import ChunkedGroup, RecurrentGroup, SlidingGroup, TokenGroup
from headrace.kv.pool import BlockPool
from headrace.kv.prefix_hash import HashExtras, extend_block_hashes
from headrace.kv.sequence import SequenceKv
from headrace.kv.tables import HitTables
from headrace.sched.deadlines import Deadlines
from headrace.sched.draft import StepDraft
from headrace.sched.quotas import Quotas
from headrace.sched.reserve import FutureUse
from headrace.sim.swarm import run_seed
from headrace.tiers.ledger import JobLedger

SEEDS = 200
STEPS = 40


def first_failure() -> int | None:
    for seed in range(SEEDS):
        try:
            run_seed(seed, STEPS)
        except Exception:
            return seed
    return None


Patch = pytest.MonkeyPatch


def plant_off_by_one_in_blocks(patch: Patch) -> None:
    def wrong(self: TokenGroup, table_blocks: int, tokens: int, encoder_tokens: int = 0) -> int:
        return max(0, tokens // self.block_tokens - table_blocks)

    patch.setattr(TokenGroup, "blocks_needed", wrong)


def plant_hit_not_pinned(patch: Patch) -> None:
    patch.setattr(BlockPool, "touch", lambda self, blocks: None)


def plant_published_one_token_early(patch: Patch) -> None:
    right = KvCoordinator.advance

    def wrong(self: KvCoordinator, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        right(self, sequence, token_ids, min(computed_tokens + 1, len(token_ids)))

    patch.setattr(KvCoordinator, "advance", wrong)


def _forget_extras(patch: Patch, forget: Callable[[HashExtras], HashExtras]) -> None:
    def wrong(
        hashes: list[bytes], token_ids: Sequence[int], hash_tokens: int, *, extras: HashExtras, root: bytes
    ) -> None:
        extend_block_hashes(hashes, token_ids, hash_tokens, extras=forget(extras), root=root)

    patch.setattr(publication, "extend_block_hashes", wrong)


def plant_salt_forgotten(patch: Patch) -> None:
    _forget_extras(patch, lambda extras: HashExtras(None, extras.adapter, extras.media, extras.embeds))


def plant_adapter_forgotten(patch: Patch) -> None:
    _forget_extras(patch, lambda extras: HashExtras(extras.salt, None, extras.media, extras.embeds))


def plant_media_forgotten(patch: Patch) -> None:
    _forget_extras(patch, lambda extras: HashExtras(extras.salt, extras.adapter, (), extras.embeds))


def plant_embeds_forgotten(patch: Patch) -> None:
    _forget_extras(patch, lambda extras: HashExtras(extras.salt, extras.adapter, extras.media, ()))


def plant_window_one_token_short(patch: Patch) -> None:
    right = SlidingGroup.skippable
    patch.setattr(SlidingGroup, "skippable", lambda self, tokens: right(self, tokens) + (tokens > 3))


def plant_chunk_freed_one_token_early(patch: Patch) -> None:
    def wrong(self: ChunkedGroup, table: list[BlockId], first_block: int, computed_tokens: int) -> int:
        return TokenGroup.free_behind(self, table, first_block, computed_tokens + 1)

    patch.setattr(ChunkedGroup, "free_behind", wrong)
    right = ChunkedGroup.free_at
    patch.setattr(ChunkedGroup, "free_at", lambda self, first_block: right(self, first_block) - 1)


def plant_any_state_will_do(patch: Patch) -> None:
    right = RecurrentGroup.longest_hit

    def wrong(self: RecurrentGroup, hashes: Sequence[bytes], max_tokens: int, longer: object = None) -> object:
        found = right(self, hashes, max_tokens)
        return type(found)(max_tokens, found.table, found.tail) if found.tail is not None else found

    patch.setattr(RecurrentGroup, "longest_hit", wrong)


def plant_tail_shared_without_a_copy(patch: Patch) -> None:
    patch.setattr(HitTables, "_ends_with", lambda self, index, tail, sequence, tokens: not self._states[index])


def plant_victim_stays_in_the_plan(patch: Patch) -> None:
    patch.setattr(StepDraft, "remove", lambda self, request: False)


def plant_freed_while_running(patch: Patch) -> None:
    right = KvCoordinator.advance

    def wrong(self: KvCoordinator, sequence: SequenceKv, token_ids: Sequence[int], computed_tokens: int) -> None:
        right(self, sequence, token_ids, computed_tokens)
        self.groups[0].pool.free(sequence.tables[0][:1])

    patch.setattr(KvCoordinator, "advance", wrong)


def plant_idle_hits_not_counted(patch: Patch) -> None:
    patch.setattr(BlockPool, "idle", lambda self, blocks: 0)


def plant_admission_too_timid(patch: Patch) -> None:
    right = FutureUse.claims

    def wrong(self: FutureUse, holders: object) -> object:
        claims = right(self, holders)  # type: ignore[arg-type]
        claims.blocks = [blocks + 6 for blocks in claims.blocks]
        return claims

    patch.setattr(FutureUse, "claims", wrong)


def plant_quota_ignored(patch: Patch) -> None:
    patch.setattr(Quotas, "allows", lambda self, request, holders: True)


def plant_deadline_ignored(patch: Patch) -> None:
    patch.setattr(Deadlines, "due", lambda self, now_s: [])


def plant_job_owns_nothing(patch: Patch) -> None:
    from headrace.tiers import ledger

    patch.setattr(ledger, "_owned", lambda blocks: [])


def plant_job_never_closed(patch: Patch) -> None:
    patch.setattr(JobLedger, "close", lambda self, job_id: None)


PLANTS = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(plant)
    plant(monkeypatch)
    assert first_failure() is not None, f"{SEEDS} seeds passed although the code is wrong"

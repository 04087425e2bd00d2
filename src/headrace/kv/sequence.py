"""What the coordinator knows of one sequence, and what a look-up finds for it. Data only; the coordinator changes it.

Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.ids import BlockId
from headrace.kv.groups import NEVER_TOKENS, GroupHit
from headrace.kv.prefix_hash import HashExtras


@dataclass(frozen=True)
class Hit:
    """The longest beginning that every group has in its cache.

    Attributes:
        tokens: its length, a multiple of the hash unit. It may end inside blocks.
        parts: what each group has. Not pinned: use it before anything else is allocated.
        shared_boundary_tokens: a longer beginning that all groups have but the recurrent ones, which lack a
            checkpoint there; 0 if there is none. The next sequence with this beginning would profit from one.
    """

    tokens: int
    parts: list[GroupHit]
    shared_boundary_tokens: int = 0


@dataclass(frozen=True)
class PendingSave:
    """Checkpoints of the recurrent states at one boundary, planned and not applied.

    Attributes:
        tokens: the boundary.
        blocks: (group, checkpoint block); each with one reference.
    """

    tokens: int
    blocks: list[tuple[int, BlockId]]


class SequenceKv:
    """The KV of one sequence, changed by the coordinator alone.

    Attributes:
        tables: block table per group; empty unless the sequence holds blocks.
        hashes: prefix hashes known so far, one a unit. They depend on tokens and extras only, so they outlive the
            blocks.
        extras: what else its KV depends on.
        prompt_tokens: length of its prompt.
        encoder_tokens: length of its encoder output, 0 without.
        cacheable: its content may be published and hit.
        covered_tokens: tokens for which every table has room.
        advance_at_tokens: computed tokens at which `KvCoordinator.advance` has something to do.
        save_at_tokens: planned tokens at which `KvCoordinator.plan_saves` has something to do.
        published_units: hash units that are published, or were hits.
        first_blocks: per group, leading places of the table that hold the null block.
        saves: checkpoints whose plan is in flight, oldest first.
        shared_boundary_tokens: of the last hit found for it, see `Hit`.
        alone: it fits only while nobody else holds blocks, see `KvCoordinator.restart_alone`.
        arriving_tokens: end of what is being loaded from outside; 0 if nothing is.
    """

    __slots__ = (
        "advance_at_tokens",
        "alone",
        "arriving_tokens",
        "cacheable",
        "covered_tokens",
        "encoder_tokens",
        "extras",
        "first_blocks",
        "hashes",
        "prompt_tokens",
        "published_units",
        "save_at_tokens",
        "saves",
        "shared_boundary_tokens",
        "tables",
    )

    def __init__(
        self,
        num_groups: int,
        *,
        extras: HashExtras,
        hashes: Sequence[bytes] = (),
        prompt_tokens: int,
        encoder_tokens: int = 0,
        cacheable: bool = True,
    ) -> None:
        self.tables: list[list[BlockId]] = [[] for _ in range(num_groups)]
        self.hashes: list[bytes] = list(hashes)
        self.extras = extras
        self.prompt_tokens = prompt_tokens
        self.encoder_tokens = encoder_tokens
        self.cacheable = cacheable
        self.saves: list[PendingSave] = []
        self.first_blocks = [0] * num_groups
        self.covered_tokens = 0
        self.advance_at_tokens = NEVER_TOKENS
        self.save_at_tokens = NEVER_TOKENS
        self.published_units = 0
        self.shared_boundary_tokens = 0
        self.arriving_tokens = 0
        self.alone = False

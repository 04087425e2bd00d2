"""Everything that is fixed for one run of the simulator.

Data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config.engine import SchedulerConfig
from headrace.types.cache_specs import KvLayout, kind_of


@dataclass(frozen=True)
class SimSetup:
    """Sizes, options and the faults that are switched on.

    Attributes:
        scheduler: limits and policy.
        layout: KV memory.
        max_model_len: longest sequence in tokens.
        vocab_tokens: number of tokens.
        prefix_caching: reuse the KV of common beginnings.
        hash_tokens: tokens under one prefix hash, or None.
        checkpoint_tokens: distance of regular checkpoints.
        hash_seed: start of the hash chain.
        keeps_hash_seed: a core that follows a crashed one has the same hashes.
        eviction: policy.
        template: after which model the layout is made, for people.
        seed: of the decisions of store, device and faults.
        sites: faults that are switched on, names of `headrace.sim.faults.SITES`.
        store: "none", "plain", or "divergent" for one that can bring recurrent states.
        encoder_rows: rows of the encoder cache.
        encoder_budget_rows: rows that one step may encode.
        right_drafts: of 8 drafts, how many are right.
    """

    scheduler: SchedulerConfig
    layout: KvLayout
    max_model_len: int
    vocab_tokens: int
    prefix_caching: bool = True
    hash_tokens: int | None = None
    checkpoint_tokens: int = 0
    hash_seed: str = ""
    keeps_hash_seed: bool = True
    eviction: str = "lru"
    template: str = "llama"
    seed: int = 0
    sites: frozenset[str] = field(default_factory=frozenset)
    store: str = "none"
    encoder_rows: int = 8
    encoder_budget_rows: int = 8
    right_drafts: int = 5

    @property
    def kinds(self) -> list[str]:
        """Kinds of the groups, in order."""
        return [kind_of(group.spec) for group in self.layout.groups]

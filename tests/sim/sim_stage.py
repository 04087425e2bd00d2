"""A small stage for scenarios: a harness whose faults are written down instead of drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.prefix_hash import block_hashes, extras_of
from headrace.sim.faults import SITES, Faults
from headrace.sim.harness import Harness
from headrace.sim.layouts import build_layout
from headrace.sim.setup import SimSetup
from headrace.types.cache_specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    IndexKeysSpec,
    RecurrentSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams

FULL = FullAttentionSpec(1, 4, 4, 2)
STATE = RecurrentSpec((StatePart("state", (8,), 4),))
INDEX = IndexKeysSpec(16)
CROSS = CrossAttentionSpec(1, 4, 4, 2)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(1, 4, 4, 2, tokens)


def chunks(tokens: int) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(1, 4, 4, 2, tokens)


class Script(Faults):
    """Faults that fire always or never; numbers that are given.

    ``depth`` 0 is a store without anything, 1 one that has all it is asked for.
    """

    def __init__(self, sites: Sequence[str] = (), numbers: Mapping[str, int] | None = None) -> None:
        super().__init__(0, sites)
        assert set(sites) <= set(SITES)
        self.numbers = dict(numbers or {})

    def fires(self, site: str, *where: int | str) -> bool:
        self.fired[site] += site in self.on
        return site in self.on

    def roll(self, what: str, *where: int | str) -> int:
        return self.numbers.get(what, 0)

    def switch(self, *sites: str) -> None:
        """From now on these sites fire, and no others."""
        self.on = frozenset(sites)


class Stage(Harness):
    """A harness with short words."""

    def __init__(
        self,
        specs: Sequence[CacheSpec] = (FULL,),
        *,
        block_tokens: int | Sequence[int] = 2,
        blocks: int | Sequence[int] = 12,
        script: Script | None = None,
        slots: int = 3,
        batch: int = 8,
        ahead: bool = False,
        drafts: int = 0,
        quota: float = 1.0,
        longest: int = 40,
        **options: object,
    ) -> None:
        sizes = [block_tokens] * len(specs) if isinstance(block_tokens, int) else block_tokens
        counts = [blocks] * len(sizes) if isinstance(blocks, int) else blocks
        config = SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=batch,
            watermark=0.0,
            speculative_tokens=drafts,
            tenant_quota=quota,
            steps_in_flight=2 if ahead else 1,
        )
        setup = SimSetup(config, build_layout(specs, sizes, counts), longest, 5, **options)  # type: ignore[arg-type]
        self.script = script or Script()
        super().__init__(setup, faults=self.script)

    def post(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        most: int = 4,
        fails_at: int | None = None,
        logprobs: bool = False,
        hashed: bool = True,
        **fields: object,
    ) -> RequestId:
        """Post a request that stops at nothing but its length."""
        source = EngineRequest(
            request_id=RequestId(name),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=most, ignore_eos=True, seed=1, prompt_logprobs=0 if logprobs else None),
            arrival_s=self.now_s,
            **fields,  # type: ignore[arg-type]
        )
        if hashed:
            unit = self.core.scheduler.hash_block_tokens
            source.block_hashes.extend(block_hashes(source.prompt_token_ids, unit, extras=extras_of(source)))
        self.add(source, fails_at)
        return source.request_id

    def step(self, steps: int = 1) -> None:
        """Plan, run and settle some steps, one after the other."""
        for _ in range(steps):
            self.schedule()
            self.apply()

    def ends(self, name: str) -> str:
        """Return how a request has ended: "length", or the code of its error."""
        delta = self.records[RequestId(name)].finish
        assert delta is not None, f"{name} has not ended"
        return delta.error.code if delta.error is not None else delta.finish_reason.text  # type: ignore[union-attr]

    def state(self, name: str) -> str:
        """Return where a request is."""
        return next(r.state.name.lower() for r in self.core.requests if r.request_id == name)

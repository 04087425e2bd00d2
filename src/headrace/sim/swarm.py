"""Random runs: each seed draws a layout, a subset of features and faults, extreme sizes, and then a course of events.

Everything comes from the seed; the same seed gives the same run on every machine. Must not check anything itself.
"""

from __future__ import annotations

import math
import random
from collections import Counter

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import capacity_tokens
from headrace.kv.eviction import POLICIES
from headrace.sim.actions import Action, ActionKind
from headrace.sim.faults import draw_sites
from headrace.sim.features import draw_features, features_of
from headrace.sim.harness import Harness
from headrace.sim.layouts import TEMPLATES, draw_layout
from headrace.sim.requests import RequestSource
from headrace.sim.setup import SimSetup
from headrace.sim.story import Story
from headrace.types.cache_specs import kind_of

LONGEST_TOKENS = 64
"""No sequence is longer, even if the memory would hold it: windows and states hold any length."""

MOST_WAVES = 200
"""A run in which nearly everything is refused ends with fewer steps."""

_ARRIVALS = (0.1, 0.5, 0.9, 0.9)


def draw_setup(rng: random.Random, seed: int) -> SimSetup:
    """Draw sizes and options. Pools are tiny, so that blocks run out and are evicted all the time."""
    template = rng.choice(list(TEMPLATES))
    layout = draw_layout(rng, template)
    sizes = [group.block_tokens for group in layout.groups if group.block_tokens]
    unit = math.gcd(*sizes) or rng.choice([1, 2, 4])
    finer = [divisor for divisor in range(1, unit) if unit % divisor == 0]
    config = _draw_scheduler(rng, has_states="recurrent" in {kind_of(group.spec) for group in layout.groups})
    capacity = capacity_tokens(
        layout, batch_tokens=config.max_num_batched_tokens, in_flight=config.steps_in_flight, encoder_tokens=6
    )
    capacity = min(capacity, LONGEST_TOKENS)
    over = rng.choice([0, 0, 0, 0, 0, 0, 1, 5])
    return SimSetup(
        config,
        layout,
        max_model_len=max(2, rng.randint(capacity // 2, capacity) + over),
        vocab_tokens=rng.choice([2, 3, 3, 5]),
        prefix_caching=rng.random() < 0.96,
        hash_tokens=rng.choice(finer) if finer and rng.random() < 0.3 else unit,
        checkpoint_tokens=rng.choice([0, 1, 3, 8, 100]),
        hash_seed=rng.choice(["", "secret"]),
        keeps_hash_seed=rng.random() < 0.5,
        eviction=rng.choice(list(POLICIES)),
        template=template,
        seed=seed,
        sites=draw_sites(rng),
        store=rng.choice(["none", "plain", "divergent"]),
        encoder_rows=rng.choice([0, 2, 4, 8, 20]),
        encoder_budget_rows=rng.choice([3, 6, 10]),
        right_drafts=rng.choice([0, 4, 6, 8]),
    )


def _draw_scheduler(rng: random.Random, *, has_states: bool) -> SchedulerConfig:
    seqs = rng.choice([1, 2, 3, 4, 4, 5, 6])
    drafts = 0 if has_states else rng.choice([0, 0, 1, 3])
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs * (1 + drafts) + rng.choice([0, 1, 3, 8, 100]),
        max_queue=rng.choice([1, 100, 100, 100, 100, 100]),
        policy=rng.choice(["fcfs", "priority"]),
        priority_ageing_s=rng.choice([0.001, 0.01, 60.0]),
        tenant_quota=rng.choice([1.0, 1.0, 0.2, 0.5, 0.8]),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3, 8]),
        watermark=rng.choice([0.0, 0.0, 0.0, 0.01, 0.1, 0.4]),
        speculative_tokens=drafts,
        steps_in_flight=rng.choice([1, 2]),
    )


class Swarm:
    """One random run.

    Attributes:
        setup: what was drawn.
        harness: the engine in small, with the actions so far.
        features: names of `headrace.sim.features.FEATURES` that are on.
    """

    def __init__(self, seed: int, *, story: Story | None = None) -> None:
        """Draw sizes and options.

        Args:
            seed: everything comes from it.
            story: is told all that happens.
        """
        self._rng = rng = random.Random(seed)
        self.setup = draw_setup(rng, seed)
        drawn = draw_features(rng)
        self.features = features_of(self.setup, drawn)
        self.harness = Harness(self.setup, story)
        hash_tokens = self.harness.core.scheduler.hash_block_tokens
        self._source = RequestSource(rng, self.setup, drawn, self.harness.faults, hash_tokens)
        self._moves = 0

    def run(self, least_steps: int = 0) -> Counter[str]:
        """Draw and do events, checking after each, until enough steps have computed something; then let all end.

        Args:
            least_steps: waves of requests follow one another until so many steps had rows. A run with a smaller
                number begins like one with a larger.

        Returns:
            How often interesting things happened.

        Raises:
            SimFault: an invariant is broken or an output is wrong.
        """
        rng, harness = self._rng, self.harness
        self._wave(rng.randint(3, 20), rng.choice(_ARRIVALS))
        for _ in range(MOST_WAVES):
            if harness.busy_steps >= least_steps:
                break
            # Without this the queue would only grow, and most steps would be spent on draining it.
            few = rng.choice([0, 2, 6])
            while harness.busy_steps < least_steps and len(harness.live_ids()) > few:
                self._engine_moves()
            if harness.busy_steps < least_steps:
                self._wave(rng.randint(3, 12), rng.choice(_ARRIVALS))
        harness.drain()
        return self.harness.counts

    def _wave(self, left: int, arrival: float) -> None:
        rng = self._rng
        while left:
            if rng.random() < arrival:
                for _ in range(rng.randint(1, min(4, left))):
                    left -= 1
                    self._arrive()
            self._world_moves()
            self._engine_moves()

    def _arrive(self) -> None:
        harness = self.harness
        source = self._source.draw(harness.now_s)
        where = source.request_id
        fails_at = None
        if harness.faults.fires("logits not finite", where):
            fails_at = harness.faults.roll("fails at", where) % 5
        harness.do(Action(ActionKind.ADD, source, fails_at))

    def _world_moves(self) -> None:
        """Let clients leave, caches be emptied and time leap, now and then."""
        rng, harness = self._rng, self.harness
        self._moves += 1
        roll, live_ids = rng.random(), harness.observer.live
        if roll < 0.4 and harness.faults.fires("client aborts", self._moves):
            live = harness.live_ids()
            if live:
                harness.do(Action(ActionKind.ABORT, request_id=rng.choice(live)))
        elif roll < 0.45 and harness.faults.fires("leader fails", self._moves):
            leaders = {record.source.leader_id for name, record in harness.records.items() if name in live_ids}
            names = [name for name in live_ids if name in leaders]
            if names:
                harness.do(Action(ActionKind.ABORT, request_id=rng.choice(names)))
        elif roll < 0.55 and harness.faults.fires("abort of nobody", self._moves):
            names = [name for name in harness.records if name not in harness.observer.live]
            harness.do(Action(ActionKind.ABORT, request_id=rng.choice([RequestId("nobody"), *names[-3:]])))
        elif roll < 0.6 and harness.faults.fires("id in use", self._moves):
            live = harness.live_ids()
            if live:
                harness.do(Action(ActionKind.ADD, harness.records[rng.choice(live)].source))
        elif roll < 0.64 and harness.faults.fires("core crash", self._moves):
            harness.do(Action(ActionKind.CRASH))
        elif roll < 0.74 and harness.faults.fires("cache reset", self._moves):
            harness.do(Action(ActionKind.RESET))
        elif roll < 0.84 and harness.faults.fires("clock jump", self._moves):
            harness.do(Action(ActionKind.CLOCK, seconds=rng.choice([0.01, 0.5, 2.0, 15.0])))

    def _engine_moves(self) -> None:
        rng, harness = self._rng, self.harness
        if harness.is_idle:
            return
        if harness.in_flight_steps < self.setup.scheduler.steps_in_flight:
            harness.do(Action(ActionKind.SCHEDULE))
        if rng.random() < 0.5:
            harness.do(Action(ActionKind.EXECUTE))
        if harness.in_flight_steps and (self.setup.scheduler.steps_in_flight == 1 or rng.random() < 0.7):
            harness.do(Action(ActionKind.APPLY))


def run_seed(seed: int, least_steps: int = 0) -> Counter[str]:
    """Run one seed to its end; as `Swarm.run`."""
    return Swarm(seed).run(least_steps)

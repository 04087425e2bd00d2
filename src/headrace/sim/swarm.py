"""Random runs: each seed draws a subset of features and extreme sizes, and then a random course of events.

Everything comes from the seed; the same seed gives the same run on every machine. Must not check anything itself.
"""

from __future__ import annotations

import random
from collections import Counter

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.kv.budget import capacity_tokens
from headrace.kv.prefix_hash import HashExtras, block_hashes
from headrace.sim.actions import Action, ActionKind
from headrace.sim.harness import Harness, SimSetup, sim_layout
from headrace.sim.oracle import expected_output
from headrace.sim.story import Story
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams


def draw_setup(rng: random.Random) -> SimSetup:
    """Draw sizes and options. Pools are tiny, so that blocks run out and are evicted all the time."""
    block_tokens = rng.choice([1, 2, 2, 3, 4])
    blocks = [(block_tokens, rng.randint(4, 16))]
    if rng.random() < 0.3:
        blocks.append((block_tokens * rng.choice([1, 2]), rng.randint(4, 16)))
    layout = sim_layout(blocks)
    seqs = rng.choice([1, 2, 3, 4, 4, 5, 6])
    capacity = capacity_tokens(layout)
    over = rng.choice([0, 0, 0, 1, 5])
    return SimSetup(
        SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.choice([0, 1, 3, 8, 100]),
            max_queue=rng.choice([1, 100, 100, 100, 100, 100]),
            policy=rng.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3, 8]),
            watermark=rng.choice([0.0, 0.0, 0.01, 0.1, 0.4]),
            steps_in_flight=rng.choice([1, 2]),
        ),
        layout,
        max_model_len=max(2, rng.randint(capacity // 2, capacity) + over),
        vocab_tokens=rng.choice([2, 3, 3, 5]),
        enable_prefix_caching=rng.random() < 0.92,
    )


class RequestSource:
    """Draws requests whose prompts share a trunk."""

    def __init__(self, rng: random.Random, setup: SimSetup, hash_tokens: int) -> None:
        """Draw the trunk and the tenants.

        Args:
            rng: where everything comes from.
            setup: sizes and options of the run.
            hash_tokens: tokens under one prefix hash.
        """
        self._rng, self._setup, self._hash_tokens = rng, setup, hash_tokens
        self._trunk = [rng.randrange(setup.vocab_tokens) for _ in range(setup.max_model_len)]
        self._salts: list[str | None] = rng.choice([[None], [None], [None, "a", "b"], ["", None, "a"]])
        self._made = 0

    @property
    def has_salts(self) -> bool:
        """Whether there are several tenants."""
        return len(self._salts) > 1

    def draw(self, now_s: float) -> EngineRequest:
        """Return the next request.

        Args:
            now_s: time of its arrival.
        """
        rng, vocab, longest = self._rng, self._setup.vocab_tokens, self._setup.max_model_len
        trunk_tokens = rng.randint(0, longest - 1) if rng.random() < 0.5 else rng.randint(0, longest // 4)
        prompt = self._trunk[:trunk_tokens] + [rng.randrange(vocab) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.95:
            prompt = (prompt or [0])[: longest - 1]
        most = rng.choice([1, 2, 5, 12, 12, 30, 30, None])
        sampling = SamplingParams(
            max_tokens=most,
            min_tokens=rng.choice([0, 0, min(3, most or 3), most or 5]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.choice([[], [], [rng.randrange(vocab)]]),
            prompt_logprobs=rng.choice([None] * 5 + [0]),
            seed=1,
        )
        salt = rng.choice(self._salts)
        hashes = block_hashes(prompt, self._hash_tokens, extras=HashExtras(salt=salt))
        self._made += 1
        source = EngineRequest(
            request_id=RequestId(f"r{self._made}"),
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=[vocab - 1] if rng.random() < 0.7 else [],
            arrival_s=now_s,
            priority=rng.randint(-1, 2),
            cache_salt=salt,
            block_hashes=hashes[: rng.choice([0, 1, len(hashes), len(hashes)])],
        )
        return self._resubmitted(source) if prompt and rng.random() < 0.1 else source

    def _resubmitted(self, source: EngineRequest) -> EngineRequest:
        """Return the request as it comes back after a crash, with a beginning of its output."""
        setup = self._setup
        full = expected_output(source, vocab_tokens=setup.vocab_tokens, max_model_len=setup.max_model_len).output_ids
        produced = full[: self._rng.randint(0, len(full))]
        fields = {name: getattr(source, name) for name in source.__struct_fields__}
        return EngineRequest(**(fields | {"produced_token_ids": produced}))


def features_of(setup: SimSetup) -> set[str]:
    """Return the names of the options that a run has switched on."""
    scheduler, sizes = setup.scheduler, [group.block_tokens for group in setup.layout.groups]
    present = {
        "two steps in flight": scheduler.steps_in_flight > 1,
        "priorities": scheduler.policy == "priority",
        "long prefills in parts": scheduler.long_prefill_token_threshold > 0,
        "watermark": scheduler.watermark > 0,
        "short queue": scheduler.max_queue == 1,
        "no prefix cache": not setup.enable_prefix_caching,
        "two groups": len(sizes) > 1,
        "two block sizes": len(set(sizes)) > 1,
    }
    return {name for name, on in present.items() if on}


FEATURES = (
    "two steps in flight",
    "priorities",
    "long prefills in parts",
    "watermark",
    "short queue",
    "no prefix cache",
    "two groups",
    "two block sizes",
    "salts",
    "aborting clients",
    "failing logits",
    "resets of the cache",
)
"""What a run may have switched on; the first eight are options, the rest is the behaviour of clients and device."""


_ARRIVALS = (0.1, 0.5, 0.9, 0.9)


class Swarm:
    """One random run.

    Attributes:
        harness: the engine in small, with the actions so far.
        features: what was drawn, names of `FEATURES`.
    """

    def __init__(self, seed: int, *, story: Story | None = None) -> None:
        """Draw sizes and options.

        Args:
            seed: everything comes from it.
            story: is told all that happens.
        """
        self._rng = rng = random.Random(seed)
        self.setup = draw_setup(rng)
        self.harness = Harness(self.setup, story)
        self._source = RequestSource(rng, self.setup, self.harness.scheduler.hash_block_tokens)
        self.features = features_of(self.setup)
        if self._source.has_salts:
            self.features.add("salts")

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
        left, arrival = rng.randint(3, 20), rng.choice(_ARRIVALS)
        self._abort, self._reset = rng.choice([0.0, 0.05, 0.2]), rng.choice([0.0, 0.0, 0.05])
        self._fault = rng.choice([0.0, 0.0, 0.2])
        weights = {
            "aborting clients": self._abort,
            "failing logits": self._fault,
            "resets of the cache": self._reset,
        }
        self.features |= {name for name, weight in weights.items() if weight}
        self._wave(left, arrival)
        while harness.busy_steps < least_steps:
            # Without this the queue would only grow, and most steps would be spent on draining it.
            few = rng.choice([0, 2, 6])
            while harness.busy_steps < least_steps and len(harness.live_ids()) > few:
                self._engine_moves()
            self._wave(rng.randint(3, 12), rng.choice(_ARRIVALS))
        harness.drain()
        return self.harness.counts

    def _wave(self, left: int, arrival: float) -> None:
        rng, harness = self._rng, self.harness
        while left:
            if rng.random() < arrival:
                for _ in range(rng.randint(1, min(4, left))):
                    left -= 1
                    source = self._source.draw(harness.now_s)
                    fails_at = rng.randint(0, 4) if rng.random() < self._fault else None
                    harness.do(Action(ActionKind.ADD, source, fails_at))
            live = harness.live_ids()
            if live and rng.random() < self._abort:
                harness.do(Action(ActionKind.ABORT, request_id=rng.choice(live)))
            if rng.random() < self._reset:
                harness.do(Action(ActionKind.RESET))
            self._engine_moves()

    def _engine_moves(self) -> None:
        rng, harness = self._rng, self.harness
        if harness.in_flight_steps < self.setup.scheduler.steps_in_flight:
            harness.do(Action(ActionKind.SCHEDULE))
        if rng.random() < 0.5:
            harness.do(Action(ActionKind.EXECUTE))
        if harness.in_flight_steps and (self.setup.scheduler.steps_in_flight == 1 or rng.random() < 0.7):
            harness.do(Action(ActionKind.APPLY))


def run_seed(seed: int, least_steps: int = 0) -> Counter[str]:
    """Run one seed to its end; as `Swarm.run`."""
    return Swarm(seed).run(least_steps)

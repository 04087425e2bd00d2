"""Hypothesis chooses the course of events on a pool of 8 blocks, and shrinks what fails to a few steps."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.base.ids import RequestId
from headrace.config.engine import SchedulerConfig
from headrace.sim.harness import Harness
from headrace.sim.layouts import full_layout
from headrace.sim.setup import SimSetup
from headrace.types.requests import EngineRequest
from headrace.types.sampling import SamplingParams

BLOCK_TOKENS = 2
USABLE_BLOCKS = 8
VOCAB_TOKENS = 3
TRUNK = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0]


class SchedulerMachine(RuleBasedStateMachine):
    """Every order of posting, planning, executing and applying that an engine may choose."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        steps_in_flight=st.sampled_from([1, 2]),
        extra_tokens=st.sampled_from([0, 1, 4, 50]),
        threshold=st.sampled_from([0, 2]),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.25]),
    )
    def start(
        self, policy: str, steps_in_flight: int, extra_tokens: int, threshold: int, caching: bool, watermark: float
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=3,
            max_num_batched_tokens=3 + extra_tokens,
            policy=policy,
            long_prefill_token_threshold=threshold,
            watermark=watermark,
            steps_in_flight=steps_in_flight,
        )
        layout = full_layout([(BLOCK_TOKENS, USABLE_BLOCKS)])
        length = BLOCK_TOKENS * USABLE_BLOCKS
        self.harness = Harness(SimSetup(config, layout, length, VOCAB_TOKENS, prefix_caching=caching))

    @rule(
        trunk_tokens=st.integers(0, len(TRUNK)),
        tail=st.lists(st.integers(0, VOCAB_TOKENS - 1), max_size=2),
        max_tokens=st.sampled_from([1, 2, 6, None]),
        stops=st.lists(st.integers(0, VOCAB_TOKENS - 1), max_size=1),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        fails_at=st.sampled_from([None, None, None, 1]),
    )
    def add(
        self,
        trunk_tokens: int,
        tail: list[int],
        max_tokens: int | None,
        stops: list[int],
        priority: int,
        salt: str | None,
        fails_at: int | None,
    ) -> None:
        source = EngineRequest(
            request_id=RequestId(f"r{len(self.harness.records)}"),
            prompt_token_ids=TRUNK[:trunk_tokens] + tail,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, seed=0),
            arrival_s=self.harness.now_s,
            priority=priority,
            cache_salt=salt,
        )
        self.harness.add(source, fails_at)

    @precondition(lambda self: self.harness.live_ids())
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        live = self.harness.live_ids()
        self.harness.abort(live[choice % len(live)])

    @rule()
    def reset(self) -> None:
        self.harness.reset_prefix_cache()

    @precondition(lambda self: self.harness.in_flight_steps < self.harness.setup.scheduler.steps_in_flight)
    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @rule()
    def execute(self) -> None:
        self.harness.execute()

    @precondition(lambda self: self.harness.in_flight_steps)
    @rule()
    def apply(self) -> None:
        self.harness.apply()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase

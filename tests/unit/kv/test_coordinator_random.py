"""Random requests over random mixes of groups, against a device that knows what every cell should hold."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_oracle import STATE, Run, Spec, chunked, full, layout_of, sliding

from headrace.types.cache_specs import CompressedSpec, CrossAttentionSpec, IndexKeysSpec, LatentSpec

STEPS = 40


def mixed_groups(rng: random.Random) -> list[tuple[Spec, int, int]]:
    """Return one to five groups with small blocks in small memories; no two specs are equal."""
    unit = rng.choice([1, 2, 4])
    drawn: dict[Spec, tuple[int, int]] = {}
    for _ in range(rng.randint(1, 4)):
        block_tokens, usable = unit * rng.choice([1, 1, 2, 4]), rng.randint(3, 24)
        kind = rng.randrange(8)
        if kind == 0:
            drawn[full(rng.randint(1, 2))] = (block_tokens, usable)
        elif kind == 1:
            drawn[sliding(rng.choice([1, 2, 4, 5, 7, 16]))] = (block_tokens, usable)
        elif kind == 2:
            drawn[chunked(rng.choice([2, 4, 5, 8, 16]))] = (block_tokens, usable)
        elif kind == 3:
            drawn[STATE] = (0, rng.randint(1, 6))
        elif kind == 4:
            drawn[LatentSpec(64)] = (block_tokens, usable)
        elif kind == 5:
            ratio = rng.choice([1, 2, 4])
            drawn[CompressedSpec(64, ratio)] = (unit * 4 * rng.choice([1, 2]), usable)
            drawn[sliding(max(ratio, 2 * ratio - 1))] = (unit, rng.randint(12, 30))
        elif kind == 6:
            drawn[IndexKeysSpec(16, rng.choice([1, 2, 4]))] = (4 * unit, usable)
        else:
            drawn[CrossAttentionSpec(1, 4, 4, 2)] = (2 * unit, rng.randint(4, 8))
    return [(spec, block_tokens, usable) for spec, (block_tokens, usable) in drawn.items()]


def run(rng: random.Random) -> Counter[str]:
    machine = Run(rng, layout_of(*mixed_groups(rng)))
    for _ in range(STEPS):
        machine.step()
    machine.drain()
    return machine.seen


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_read_finds_the_right_content(rng: random.Random) -> None:
    run(rng)


def test_fixed_seeds_meet_everything() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += run(random.Random(seed))
    kinds = {"full", "sliding", "chunked", "recurrent", "latent", "compressed", "index"}
    wanted = kinds | {"hits", "copies", "saves", "boundaries", "loads", "preempted"}
    assert not wanted - set(seen), f"never happened: {wanted - set(seen)}"

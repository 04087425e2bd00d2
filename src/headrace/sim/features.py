"""What a run may have switched on: options of the engine and behaviour of its clients.

A table of names; must not draw requests or run anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

from headrace.sim.setup import SimSetup


@dataclass(frozen=True)
class Features:
    """What the requests of a run bring beside tokens.

    Attributes:
        salts: tenants with salts of their own.
        tenants: names that count towards quotas.
        adapters: digests.
        media: images between the tokens.
        embeds: embeddings in place of tokens.
        grammars: gated sampling.
        siblings: several sequences with one prompt.
        deadlines: ends in time.
        logprobs: of prompt or output.
    """

    salts: bool = False
    tenants: bool = False
    adapters: bool = False
    media: bool = False
    embeds: bool = False
    grammars: bool = False
    siblings: bool = False
    deadlines: bool = False
    logprobs: bool = False


def draw_features(rng: random.Random) -> Features:
    """Draw a subset; each feature is in about every third run."""
    return Features(**{field.name: rng.random() < 0.35 for field in fields(Features)})


OPTIONS = (
    "two steps in flight",
    "priorities",
    "long prefills in parts",
    "watermark",
    "short queue",
    "no prefix cache",
    "several groups",
    "several block sizes",
)
"""Options of the engine, as `features_of` names them."""

FEATURES = (*OPTIONS, *(field.name for field in fields(Features)))
"""All names, options first."""


def features_of(setup: SimSetup, features: Features) -> set[str]:
    """Return the names of all that a run has switched on."""
    scheduler, sizes = setup.scheduler, {group.block_tokens for group in setup.layout.groups}
    present = {
        "two steps in flight": scheduler.steps_in_flight > 1,
        "priorities": scheduler.policy == "priority",
        "long prefills in parts": scheduler.long_prefill_token_threshold > 0,
        "watermark": scheduler.watermark > 0,
        "short queue": scheduler.max_queue == 1,
        "no prefix cache": not setup.prefix_caching,
        "several groups": len(setup.layout.groups) > 1,
        "several block sizes": len(sizes) > 1,
    }
    on = {name for name, is_on in present.items() if is_on}
    return on | {field.name for field in fields(Features) if getattr(features, field.name)}

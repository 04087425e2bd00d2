"""Faults of the outside world, as named sites.

A run switches each site on with probability 1/4; then it fires with probability 1/4 whenever it is passed. Whether it
fires depends on the seed and on where it is passed, not on what happened before, so that a run that was cut down fails
in the same way. Must not do anything itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

from headrace.sim.oracle import number_of

SITES: dict[str, str] = {
    "client aborts": "a client goes away, whatever state its request is in",
    "abort of nobody": "an abort of a request that has ended or never was",
    "logits not finite": "the device's output for one request is not usable from some token on",
    "cache reset": "everything that is cached and idle is to be forgotten",
    "core crash": "the core ends at once and a new one gets the unfinished requests, with the tokens they have",
    "clock jump": "time leaps: a machine slept, or a step took seconds",
    "deadline near": "a request may only live for a few steps",
    "id in use": "the front end sends a request twice",
    "hashes missing": "the front end sends fewer prefix hashes than it could",
    "resubmitted": "a request comes with output of a life before",
    "grammar late": "a grammar is compiled when others have long begun",
    "grammar fails": "a grammar cannot be compiled",
    "lookup late": "the store answers a look-up later",
    "lookup never answers": "the store says that it will answer, and never does",
    "load fails": "the store has promised tokens and delivers none",
    "load partial": "a part of what was promised is good",
    "load late": "a load reports after everybody has given it up",
    "report twice": "a load reports twice",
    "report out of range": "a load says that it brought more, or less, than it was asked for",
    "report of a former life": "a load of a crashed core reports to the new one",
    "capability changes": "what the store can do changes while it runs",
    "oversized item": "a media item is larger than a step may encode",
    "never fits": "a request needs more KV than there is",
    "leader fails": "the request that computes a common prompt for others goes away",
}
"""Name -> what happens."""


class Faults:
    """The sites of one run.

    Attributes:
        on: sites that are switched on.
        fired: how often each has fired.
    """

    def __init__(self, seed: int, on: Collection[str]) -> None:
        """Switch sites on.

        Args:
            seed: of the run.
            on: names of `SITES`.
        """
        self._seed = seed
        self.on = frozenset(on)
        self.fired: Counter[str] = Counter()

    def fires(self, site: str, *where: int | str) -> bool:
        """Return whether a site fires here.

        Args:
            site: a name of `SITES`.
            where: what makes this passing different from all others.
        """
        if site not in self.on:
            return False
        fires = self.roll(site, *where) % 4 == 0
        self.fired[site] += fires
        return fires

    def roll(self, what: str, *where: int | str) -> int:
        """Return a large number that depends on the seed and the arguments alone."""
        numbers = [number_of("where", part) if isinstance(part, str) else part for part in where]
        mixed = hash((self._seed, number_of("site", what), *numbers))
        # Tuple hashes of close numbers are close in their low bits.
        return (mixed ^ mixed >> 29) * 0x9E3779B97F4A7C15 >> 17 & 0xFFFFFFFF


def draw_sites(rng: random.Random) -> frozenset[str]:
    """Draw which sites a run switches on."""
    return frozenset(site for site in SITES if rng.random() < 0.25)

"""What must have happened at least once in a campaign: an empty cell means that nothing was proven about it.

A table; must not run anything.
"""

from __future__ import annotations

from headrace.sim.faults import SITES

KINDS = ("full", "sliding", "chunked", "latent", "compressed", "index", "recurrent", "cross")
"""Kinds of cache that take memory."""

_EVENTS = (
    "requests",
    "steps planned ahead",
    "preemptions",
    "preempted in flight",
    "hits",
    "hit tokens",
    "evictions",
    "cache resets",
    "aborts of nobody",
    "rows dropped",
    "slots reused in one plan",
    "prompt logprobs",
    "resubmitted",
    "crashes",
    "crashes with work in flight",
    "clock jumps",
    "ids used twice",
    "lookups",
    "loads",
    "grammars",
    "gated rows",
    "rows with drafts",
    "drafts accepted",
    "drafts refused",
    "encoder runs",
    "encoder outputs dropped",
    "checkpoints saved",
    "checkpoints saved ahead",
    "extents lent on",
    "tails taken over",
    "finish stop",
    "finish length",
)
_ERRORS = (
    "non_finite_logits",
    "kv_cache_too_small",
    "context_length_exceeded",
    "invalid_request",
    "overloaded",
    "request_timeout",
    "media_too_large",
    "id in use",
)
_MOVES = (
    "waiting -> running",
    "new -> waiting",
    "new -> running",
    "new -> grammar",
    "new -> leader",
    "new -> loading",
    "waiting -> quota",
    "waiting -> lookup",
    "waiting -> loading",
    "waiting -> finished",
    "grammar -> waiting",
    "grammar -> leader",
    "grammar -> running",
    "grammar -> finished",
    "leader -> waiting",
    "leader -> finished",
    "quota -> waiting",
    "quota -> finished",
    "lookup -> waiting",
    "lookup -> running",
    "lookup -> loading",
    "lookup -> finished",
    "loading -> arrived",
    "loading -> running",
    "loading -> waiting",
    "loading -> finished",
    "arrived -> running",
    "running -> preempted",
    "running -> finished",
    "preempted -> running",
    "preempted -> finished",
)
"""As seen from call to call of the scheduler; a request may have passed through more in between."""

_RARE = (
    "leader -> running",
    "quota -> running",
    "aborts preempted",
    "preempted -> quota",
    "preempted -> lookup",
    "preempted -> loading",
    "arrived -> preempted",
    "arrived -> finished",
    "aborts leader",
    "aborts loading",
    "aborts arrived",
    "aborts quota",
    "crashed while loading",
    "crashed while preempted",
)


def common_cells() -> list[str]:
    """Return what a few hundred seeds must show."""
    kinds = [f"hit {kind}" for kind in KINDS]
    kinds += [f"evicted {kind}" for kind in KINDS if kind != "cross"]
    kinds += [f"copied {kind}" for kind in KINDS if kind != "cross"]
    kinds += [f"hit {kind} behind null blocks" for kind in ("sliding", "chunked")]
    aborts = [f"aborts {state}" for state in ("waiting", "running", "grammar", "lookup")]
    errors = [f"error {code}" for code in _ERRORS]
    return [*_EVENTS, *errors, *_MOVES, *aborts, *kinds, *(f"fault {site}" for site in SITES)]


def rare_cells() -> list[str]:
    """Return what takes a thousand."""
    return list(_RARE)

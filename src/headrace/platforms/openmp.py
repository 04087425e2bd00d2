"""How long the threads of a CPU operator spin while they wait for each other. Must not import torch.

GNU OpenMP, which torch's CPU builds use, spins for milliseconds by default. When another process holds one of the cores
(the HTTP front end, a client, a neighbour), the waiting thread burns the other core instead of letting the late one run
there, and an operator of 0.1 ms takes a scheduler tick of 8 ms. This count is the smallest that costs nothing on a
quiet machine, where 1,000 would lose 40 %; beside a busy process it is about 4 times faster than 100,000. Figures in
``docs/performance.md``.
"""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "10000"
_CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environ: MutableMapping[str, str]) -> bool:
    """Set a short spin unless the user has chosen otherwise. Takes effect if torch is loaded after it.

    Args:
        environ: the environment to change, usually ``os.environ``.

    Returns:
        True if it was set here.

    Mutates: ``environ``.
    """
    if any(name in environ for name in _CHOSEN_BY_USER):
        return False
    environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return True

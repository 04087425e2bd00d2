"""What can happen to the engine in a simulation, as values, so that a run can be recorded, cut and run again.

Must not do anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.base.ids import RequestId
from headrace.types.requests import EngineRequest


class ActionKind(Enum):
    """One thing that a front end, an engine or the outside world does."""

    ADD = "add"
    ABORT = "abort"
    RESET = "reset"
    CLOCK = "clock"
    CRASH = "crash"
    SCHEDULE = "schedule"
    EXECUTE = "execute"
    APPLY = "apply"


@dataclass(frozen=True)
class Action:
    """One event of a run.

    Attributes:
        kind: what is done.
        source: the request of an ``ADD``.
        fails_at: output position at which its logits are not finite, or None.
        request_id: whom an ``ABORT`` is about; it may have ended.
        seconds: by which a ``CLOCK`` jumps.
    """

    kind: ActionKind
    source: EngineRequest | None = None
    fails_at: int | None = None
    request_id: RequestId | None = None
    seconds: float = 0.0

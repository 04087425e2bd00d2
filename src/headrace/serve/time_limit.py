"""How long a request may live: its own ``timeout`` and the server's option.

Two clocks keep it. The front end's answers on time, also while the core restarts; the core's takes the request out of
the queue or off the device without being told. Must not know the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.errors import RequestTimeoutError

if TYPE_CHECKING:
    from headrace.serve.openai.schema_common import SamplingFields


@dataclass(frozen=True)
class TimeLimit:
    """How long a request may live.

    Attributes:
        seconds: from the moment at which it begins to run; 0 is no limit.
        origin: the field or option that says so.
    """

    seconds: float = 0.0
    origin: str = ""

    def error(self) -> RequestTimeoutError:
        """Return the answer to a request that lived longer."""
        return RequestTimeoutError(f"the request took longer than {self.seconds:g} s ({self.origin})")


NO_LIMIT = TimeLimit()


def time_limit(body: SamplingFields, server_limit_s: float) -> TimeLimit:
    """Return the limit of a request: its own ``timeout``, or the server's if that is shorter.

    Args:
        body: the request.
        server_limit_s: the server's limit in seconds, 0 for none.
    """
    if body.timeout is not None and not 0.0 < server_limit_s < body.timeout:
        return TimeLimit(body.timeout, "timeout")
    return TimeLimit(server_limit_s, "--request-timeout-s") if server_limit_s > 0.0 else NO_LIMIT

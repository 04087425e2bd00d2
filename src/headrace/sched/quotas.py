"""How much of the KV memory one tenant's requests may hold.

The rule: a request starts only if the known tokens of its tenant's running requests and its own, taken together, need
at most the quota's share of the memory. Those that run may outgrow it; nobody is preempted for a quota. A tenant with
nothing running may always start one request, so a quota never makes a request impossible. Must not park or wake.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.kv.budget import group_need_blocks
from headrace.sched.request import Request
from headrace.types.cache_specs import KvLayout


class Quotas:
    """The arithmetic of the quota. Shared blocks count for each request that uses them."""

    def __init__(self, layout: KvLayout, *, quota: float, batch_tokens: int, in_flight: int) -> None:
        """Note the sizes.

        Args:
            layout: of the KV memory.
            quota: share of the memory, 0 to 1; 1 turns quotas off.
            batch_tokens: most tokens of one sequence in one step.
            in_flight: plans made before the first result is applied.
        """
        self.enabled = quota < 1.0
        self._groups = layout.groups
        self._limit_granules = quota * layout.extent_granules * layout.num_extents
        self._batch_tokens, self._in_flight = batch_tokens, in_flight

    def allows(self, request: Request, holders: Iterable[Request]) -> bool:
        """Return whether a request may start beside those that hold memory now.

        Args:
            request: a waiting one.
            holders: all requests that hold blocks.
        """
        tenant = request.source.tenant
        if not self.enabled or tenant is None:
            return True
        held = [self._granules(holder) for holder in holders if holder.source.tenant == tenant]
        return not held or sum(held) + self._granules(request) <= self._limit_granules

    def _granules(self, request: Request) -> int:
        return sum(
            group.block_granules
            * group_need_blocks(
                group,
                request.known_tokens,
                batch_tokens=self._batch_tokens,
                in_flight=self._in_flight,
                encoder_tokens=request.source.encoder_tokens,
            )
            for group in self._groups
        )

"""What requests owe one another: the share of a tenant, and the patience of those who share a prompt.

Must not assume how the scheduler keeps these rules.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from headrace.sched.request import Request
from headrace.sim.cells import demand
from headrace.sim.setup import SimSetup
from headrace.types.plans import StepPlan

if TYPE_CHECKING:
    from headrace.sim.core import SimCore


def check_quotas(setup: SimSetup, core: SimCore, plan: StepPlan) -> None:
    """A tenant who just got memory for another request holds no more than its share, or this request alone.

    What runs may grow beyond the share, so nothing is said about tenants who got nothing new. Drafts take blocks beyond
    what a start is judged by, so with them nothing is said at all.
    """
    quota = setup.scheduler.tenant_quota
    if quota >= 1.0 or setup.scheduler.speculative_tokens:
        return
    got = {start.request_id for start in plan.starts} | {job.request_id for job in plan.loads}
    # What a load has brought was given out before.
    got -= core.held_before
    if not got:
        return
    held: defaultdict[str, list[Request]] = defaultdict(list)
    for request in core.holders():
        if request.source.tenant is not None:
            held[request.source.tenant].append(request)
    memory = core.scheduler.kv.memory
    for tenant, requests in held.items():
        if len(requests) < 2 or not any(request.request_id in got for request in requests):
            continue
        granules = sum(memory.held_granules(request.kv.tables) for request in requests)
        most = quota * memory.total_granules
        demand(granules <= most, f"tenant {tenant} got memory for a request and holds {granules} of {most} granules")


def check_followers(core: SimCore, plan: StepPlan) -> None:
    """A request that was to wait for another one's prompt did not start while that was being computed.

    A leader that was preempted has lost what it had computed, so nothing is said about it.
    """
    if not plan.starts:
        return
    leaders = {request.request_id: request for request in core.running if not request.preemptions}
    starts = {start.request_id for start in plan.starts}
    for request in core.running:
        leader = leaders.get(request.source.leader_id) if request.source.leader_id is not None else None
        if leader is None or request.request_id not in starts or request.preemptions:
            continue
        if request.wants_prompt_logprobs or not request.kv.cacheable or not leader.kv.cacheable:
            continue
        waited = (
            leader.computed_tokens >= leader.prompt_tokens or request.prompt_tokens <= core.scheduler.kv.hash_tokens
        )
        demand(waited, f"{request.request_id} starts beside {leader.request_id}, whose prompt it was to share")

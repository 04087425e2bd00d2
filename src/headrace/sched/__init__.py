"""The scheduler: ``schedule(inbox, now) -> plan`` and ``apply(plan, result) -> deltas``, synchronous and total.

Must not import torch, a clock, randomness, sockets or threads: time and events are passed in.
"""

"""Storage below the device, the deciding side: the contract of an outside KV store, and who owns blocks meanwhile.

Must not move bytes, know requests' states, or read a clock: `transfer` moves, `sched` decides when.
"""

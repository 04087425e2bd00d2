"""Id types. An id is never a bare int or str in a signature."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
"""Index of a KV block in its group's memory. Block 0 is the null block."""
GroupId = NewType("GroupId", int)
Slot = NewType("Slot", int)
"""Row of a request in the worker's per-slot arrays, for as long as the request runs."""
StepId = NewType("StepId", int)

NULL_BLOCK = BlockId(0)

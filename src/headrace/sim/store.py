"""An outside store of KV that answers late, not at all, or with less than it promised; and compilers of grammars.

It is a connector for the scheduler and a source of inbox events for the harness. All that it does follows from the
seed and from what it is asked. Must not write memory: the device does, when the harness tells it that a load lands.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from headrace.base.ids import RequestId
from headrace.sim.cells import demand
from headrace.sim.faults import Faults
from headrace.tiers.connector import ConnectorCapabilities
from headrace.types.events import InboxEvent, JobDone, LookupDone
from headrace.types.plans import LoadJob

_SOON_S = (0.0, 0.001, 0.002, 0.005, 0.02)
_LATE_S = (0.05, 0.3, 1.5, 12.0)


class Timetable:
    """Events that are on their way, by the second at which they arrive."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, InboxEvent]] = []
        self._numbers = 0

    def put(self, due_s: float, event: InboxEvent) -> None:
        """Let an event arrive at a time."""
        self._numbers += 1
        heapq.heappush(self._due, (due_s, self._numbers, event))

    def take(self, now_s: float) -> list[InboxEvent]:
        """Return what has arrived, in order, and forget it."""
        taken: list[InboxEvent] = []
        while self._due and self._due[0][0] <= now_s:
            taken.append(heapq.heappop(self._due)[2])
        return taken

    @property
    def next_s(self) -> float | None:
        """Time of the next arrival."""
        return self._due[0][0] if self._due else None

    def drop(self, kind: type) -> list[InboxEvent]:
        """Forget all events of a kind and return them."""
        dropped = [event for _, _, event in self._due if isinstance(event, kind)]
        self._due = [entry for entry in self._due if not isinstance(entry[2], kind)]
        heapq.heapify(self._due)
        return dropped


class FakeStore:
    """A `KvConnector`, and the far end of its loads.

    Attributes:
        now_s: set by the harness before the scheduler may ask.
        unit_tokens: tokens under one hash; what it offers is a multiple.
        counts: what it was asked and what it answered.
    """

    def __init__(self, faults: Faults, timetable: Timetable, *, divergent_hits: bool) -> None:
        """Make a store that has something for about every second request.

        Args:
            faults: sites.
            timetable: takes its answers.
            divergent_hits: capability, unless a fault changes it.
        """
        self._faults = faults
        self._timetable = timetable
        self._divergent_hits = divergent_hits
        self._asked: Counter[RequestId] = Counter()
        self._looking: set[RequestId] = set()
        self._offers: dict[RequestId, tuple[int, int]] = {}
        self._planned: dict[int, LoadJob] = {}
        self._contents: dict[bytes, int] = {}
        self._capability_reads = 0
        self.now_s = 0.0
        self.unit_tokens = 1
        self.counts: Counter[str] = Counter()

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """What it can do now."""
        self._capability_reads += 1
        changed = self._faults.fires("capability changes", self._capability_reads // 8)
        return ConnectorCapabilities(divergent_hits=self._divergent_hits ^ changed)

    def lookup(
        self, request_id: RequestId, hashes: Sequence[bytes], local_tokens: int, limit_tokens: int
    ) -> int | None:
        """Say how much it has; or nothing yet, now or for ever."""
        asked = self._asked[request_id]
        self._asked[request_id] += 1
        demand(local_tokens <= limit_tokens, f"{request_id}: the store is asked from {local_tokens} to {limit_tokens}")
        self.counts["lookups"] += 1
        self._offers.pop(request_id, None)
        demand(request_id not in self._looking, f"{request_id} asks again, although the store has not answered")
        if self._faults.fires("lookup never answers", request_id, asked):
            self._looking.add(request_id)
            return None
        if self._faults.fires("lookup late", request_id, asked):
            self._looking.add(request_id)
            self._timetable.put(self.now_s + self._delay(_SOON_S + _LATE_S, request_id, asked), LookupDone(request_id))
            return None
        roll = self._faults.roll("depth", request_id)
        unit, units = self.unit_tokens, limit_tokens // self.unit_tokens
        depth = (0, limit_tokens, roll // 8 % (units + 1) * unit, roll // 64 % (units + 1) * unit)[roll % 4]
        found = max(0, depth - local_tokens)
        self._offers[request_id] = (local_tokens, found)
        return found

    def answered(self, request_id: RequestId) -> None:
        """An answer is in the inbox: the one who waits for it may ask again."""
        self._looking.discard(request_id)

    def load_planned(self, job: LoadJob) -> None:
        """Take note of a load."""
        local, found = self._offers.get(job.request_id, (0, 0))
        good = job.start_tokens == local and job.end_tokens == local + found and found > 0
        demand(good, f"job {job.job_id}: {job.start_tokens} to {job.end_tokens}, offered were {found} from {local}")
        demand(job.job_id not in self._planned, f"job {job.job_id} is planned twice")
        self._planned[job.job_id] = job

    def request_finished(self, request_id: RequestId) -> None:
        """Take note of an end: exactly one for everybody who asked."""
        demand(request_id in self._asked, f"{request_id} never asked the store, or has ended twice")
        del self._asked[request_id]
        self._looking.discard(request_id)
        self._offers.pop(request_id, None)

    def begin(self, job: LoadJob, contents: Sequence[int]) -> None:
        """Begin a load that the device has got, and decide how it ends.

        Args:
            job: of a plan.
            contents: what the request needs in its first positions; what lies under a key depends on the key alone.
        """
        first = job.start_tokens // self.unit_tokens
        for place, block_hash in enumerate(job.hashes, first + 1):
            content = contents[place * self.unit_tokens - 1]
            kept = self._contents.setdefault(block_hash, content)
            demand(kept == content, f"job {job.job_id} asks for a key under which something else is kept")
        demand(self._planned.pop(job.job_id, None) is job, f"job {job.job_id} was never announced")
        faults, where = self._faults, job.request_id
        span = job.end_tokens - job.start_tokens
        valid = job.end_tokens
        if faults.fires("load fails", where, job.start_tokens):
            valid = job.start_tokens
        elif faults.fires("load partial", where, job.start_tokens):
            valid = job.start_tokens + faults.roll("valid", where) % span
        elif faults.fires("report out of range", where, job.start_tokens):
            valid = (job.end_tokens + 1 + faults.roll("valid", where) % 5, -1)[faults.roll("sign", where) % 2]
        late = faults.fires("load late", where, job.start_tokens)
        due_s = self.now_s + self._delay(_LATE_S if late else _SOON_S, where, job.start_tokens)
        self._timetable.put(due_s, JobDone(job.job_id, valid))
        if faults.fires("report twice", where, job.start_tokens):
            self._timetable.put(due_s + self._delay(_SOON_S, where), JobDone(job.job_id, valid))

    def crashed(self) -> None:
        """The core that asked is gone; a new one begins. Reports to the old one may still arrive."""
        self._asked.clear()
        self._looking.clear()
        self._offers.clear()
        self._planned.clear()

    def check_end(self) -> None:
        """Everybody who asked has ended, and every load that was planned was begun."""
        demand(not self._asked, f"the store was never told of the end of {list(self._asked)}")
        demand(not self._planned, f"jobs {list(self._planned)} were planned and never begun")

    def _delay(self, choices: Sequence[float], *where: int | str) -> float:
        return choices[self._faults.roll("delay", *where) % len(choices)]

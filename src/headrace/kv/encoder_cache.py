"""Which encoder outputs the worker keeps: a ledger of rows and references, decided here and stored there.

Nothing is evicted while a step is planned. A plan only takes references; what has to go is chosen when the plan is
closed, from what is then in use. So a request that is looked at and not scheduled costs nobody an output, taking a row
back needs no repair, and a notice of removal tells of the final state and never of one in between.

Must not know tokens, plans or states of requests: an owner is a name, a use is a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.base.errors import invariant
from headrace.base.ids import RequestId


@dataclass(slots=True)
class _Output:
    """One encoder output.

    Attributes:
        rows: what it takes.
        passing: larger than the whole cache: it lives for the step that uses it, beside the cache.
        uses: (owner, use) that hold it: **one for each occurrence**, so that an image shown twice in a request stays
            until its last occurrence is done.
        idle_since: rises with every release; the smallest is evicted first.
    """

    rows: int
    passing: bool
    uses: dict[tuple[RequestId, int], None] = field(default_factory=dict)
    idle_since: int = 0


class EncoderCache:
    """Encoder outputs by identifier, counted in rows of the encoder's output, whole items only.

    An output is fresh (its encoder runs in the plan being made), in use, idle (kept as long as nobody needs the room),
    or gone. The rows in use never exceed the capacity; when a plan is closed, rows in use and idle together do not.
    """

    def __init__(self, capacity_rows: int, *, passing_rows: int) -> None:
        """Make an empty cache.

        Args:
            capacity_rows: rows that the worker keeps from step to step; 0 keeps nothing.
            passing_rows: rows that items larger than the cache may take in one step beside it; also the most rows
                that one step may encode.
        """
        invariant(capacity_rows >= 0 and passing_rows > 0, f"encoder cache of {capacity_rows} and {passing_rows} rows")
        self.capacity_rows = capacity_rows
        self.passing_rows = passing_rows
        self._outputs: dict[str, _Output] = {}
        self._fresh: dict[str, None] = {}
        self._used_rows = 0
        self._used_passing_rows = 0
        self._clock = 0
        self._gone: dict[str, None] = {}
        # Uses taken since the plan was opened, by owner: what `undo` takes back.
        self._taken: dict[RequestId, list[int]] = {}
        self._held: dict[RequestId, dict[int, tuple[str, _Output]]] = {}

    @property
    def used_rows(self) -> int:
        """Rows that some owner holds."""
        return self._used_rows

    @property
    def free_rows(self) -> int:
        """Rows that nobody holds, idle ones included."""
        return self.capacity_rows - self._used_rows

    @property
    def resident_rows(self) -> int:
        """Rows of the cache in use or idle; above the capacity only while a plan is being made."""
        # A distrusted output is found no more, and takes its rows as long as somebody holds it.
        return self._used_rows + sum(o.rows for o in self._outputs.values() if not o.passing and not o.uses)

    @property
    def identifiers(self) -> list[str]:
        """Outputs that the worker has once the plan being made has run."""
        return list(self._outputs)

    @property
    def fresh_rows(self) -> int:
        """Rows to be encoded by the plan being made."""
        return sum(self._outputs[identifier].rows for identifier in self._fresh)

    def has(self, identifier: str) -> bool:
        """Return whether the output is there without encoding it (again)."""
        return identifier in self._outputs

    def holds(self, owner: RequestId, use: int) -> bool:
        """Return whether an owner holds an output for this use."""
        return use in self._held.get(owner, ())

    def uses_of(self, owner: RequestId) -> list[int]:
        """Return the uses for which an owner holds an output."""
        return list(self._held.get(owner, ()))

    def can_fit(self, items: Iterable[tuple[str, int]]) -> bool:
        """Return whether all of some items could be taken now. Changes nothing.

        Args:
            items: (identifier, rows); one that occurs twice counts once.
        """
        rows, passing_rows = self._used_rows, self._used_passing_rows
        seen: set[str] = set()
        for identifier, item_rows in items:
            output = self._outputs.get(identifier)
            if identifier in seen or (output is not None and output.uses):
                continue
            seen.add(identifier)
            output = output or _Output(item_rows, item_rows > self.capacity_rows)
            if output.passing:
                passing_rows += output.rows
            else:
                rows += output.rows
        return rows <= self.capacity_rows and passing_rows <= self.passing_rows

    def allocate(self, owner: RequestId, use: int, identifier: str, rows: int) -> bool:
        """Take a reference, for a request that is really scheduled.

        Args:
            owner: who.
            use: which of its occurrences; an owner takes each once until it is released.
            identifier: of the output. Two that are equal are the same output: the rows of the first count.
            rows: of the item.

        Returns:
            True if the output is not there, so that its encoder must run in this plan.

        Mutates: the cache.
        Requires: the item fits (`can_fit`).
        """
        invariant(not self.holds(owner, use), f"{owner}: use {use} of {identifier} is taken already")
        invariant(self.can_fit([(identifier, rows)]), f"{owner}: {identifier} of {rows} rows does not fit")
        output = self._outputs.get(identifier)
        must_encode = output is None
        if output is None:
            output = self._outputs[identifier] = _Output(rows, rows > self.capacity_rows)
            self._fresh[identifier] = None
        if not output.uses:
            self._count(output, output.rows)
        output.uses[owner, use] = None
        self._held.setdefault(owner, {})[use] = (identifier, output)
        self._taken.setdefault(owner, []).append(use)
        return must_encode

    def undo(self, owner: RequestId) -> None:
        """Take back what an owner took since the plan was opened: its row is not in the plan any more.

        An output that was only to be encoded for it vanishes; an idle one is as old as before.

        Mutates: the cache.
        """
        for use in self._taken.pop(owner, []):
            if self.holds(owner, use):
                self._drop(owner, use, touched=False)

    def release(self, owner: RequestId, use: int) -> None:
        """Give up the reference of one occurrence. One that is not held is ignored.

        Mutates: the cache.
        Requires: the steps that read it are **applied**, or the owner has lost its row for good: a plan removes outputs
            in order, so a plan already made still finds it.
        """
        if self.holds(owner, use):
            self._drop(owner, use, touched=True)

    def release_all(self, owner: RequestId) -> None:
        """Give up every reference of an owner, those of the plan being made included (preempted, finished, aborted).

        Mutates: the cache.
        """
        self.undo(owner)
        for use in self.uses_of(owner):
            self.release(owner, use)

    def distrust(self, owner: RequestId, identifiers: Iterable[str] = ()) -> None:
        """Let nobody else use the outputs that an owner holds or has used: its row failed, perhaps because of them.

        Those who hold them already keep them; the next taker encodes anew.

        Args:
            owner: who.
            identifiers: of all its items; an output beside the cache is held for its step alone, and may linger.

        Mutates: the cache.
        Requires: no plan is being made.
        """
        invariant(not self._fresh, "an output cannot be distrusted while its plan is being made")
        for identifier, output in self._held.get(owner, {}).values():
            if self._outputs.get(identifier) is output:
                del self._outputs[identifier]
        for identifier in identifiers:
            known = self._outputs.get(identifier)
            if known is not None:
                del self._outputs[identifier]
                if not known.uses:
                    self._gone[identifier] = None

    def fresh(self) -> list[tuple[str, RequestId, int]]:
        """Return (identifier, owner, use) for each output that the plan being made must encode.

        If the first of several owners has lost its row, the next one brings the item.
        """
        return [(identifier, *next(iter(self._outputs[identifier].uses))) for identifier in self._fresh]

    def close_plan(self) -> list[str]:
        """Evict what does not fit, and open the next plan.

        Returns:
            Identifiers whose output the worker drops **before** the encoders of this plan run; each was resident, none
            is resident now, and none is reported twice.

        Mutates: the cache.
        """
        for identifier in [name for name, output in self._outputs.items() if output.passing and not output.uses]:
            self._evict(identifier)
        excess_rows = self.resident_rows - self.capacity_rows
        if excess_rows > 0:
            idle = [(output.idle_since, name) for name, output in self._outputs.items() if not output.uses]
            for _, identifier in sorted(idle):
                if excess_rows <= 0:
                    break
                excess_rows -= self._outputs[identifier].rows
                self._evict(identifier)
        gone = [identifier for identifier in self._gone if identifier not in self._outputs]
        self._gone.clear()
        self._fresh.clear()
        self._taken.clear()
        self._end_passing()
        return gone

    def reset(self) -> bool:
        """Forget every output that nobody holds (the encoder's weights changed, say).

        Returns:
            True if nothing is left.

        Mutates: the cache.
        Requires: no plan is being made.
        """
        invariant(not self._fresh, "the encoder cache cannot be reset while a plan is being made")
        for identifier in [name for name, output in self._outputs.items() if not output.uses]:
            self._evict(identifier)
        return not self._outputs

    def _count(self, output: _Output, rows: int) -> None:
        if output.passing:
            self._used_passing_rows += rows
        else:
            self._used_rows += rows

    def _drop(self, owner: RequestId, use: int, *, touched: bool) -> None:
        held = self._held[owner]
        identifier, output = held.pop(use)
        if not held:
            del self._held[owner]
        del output.uses[owner, use]
        if output.uses:
            return
        self._count(output, -output.rows)
        if self._outputs.get(identifier) is not output:
            # Distrusted: nobody could have taken it since. A fresh one of the same name overwrites it.
            self._gone[identifier] = None
        elif identifier in self._fresh:
            # Its encoder has not run and will not: there is nothing to keep and nothing to report.
            del self._fresh[identifier], self._outputs[identifier]
        elif touched:
            self._clock += 1
            output.idle_since = self._clock

    def _evict(self, identifier: str) -> None:
        del self._outputs[identifier]
        self._gone[identifier] = None

    def _end_passing(self) -> None:
        """An output beside the cache is held for one step; the next plan may take it again or lets it go."""
        for output in self._outputs.values():
            if output.passing:
                for owner, use in list(output.uses):
                    self._drop(owner, use, touched=True)

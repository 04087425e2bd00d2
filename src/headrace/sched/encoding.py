"""How far a row may go before encoder outputs limit it, and which encoders a plan runs.

A row needs the output of every media item that it touches, whole items only. It is cut before the first item that does
not fit into this step. An item without prompt positions feeds cross attention: the first row of a request's stay in its
slot needs it, and no other, because what is made of it lies in KV blocks then. Must not plan rows or own blocks; the
scheduler asks, and takes what it really plans.

Why no request is stuck for ever: an item larger than a whole step's budget is refused at the door; one larger than the
cache is encoded beside it for the step that uses it; and an item is given up at the latest when its request stands at
the next one, so that a request never waits for room that it holds itself. Cuts are never rounded: a chunk may end
anywhere, also between two checkpoint boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import MediaTooLargeError, RequestError, invariant
from headrace.base.ids import RequestId, Slot
from headrace.kv.encoder_cache import EncoderCache
from headrace.types.plans import EncodeItem
from headrace.types.requests import MediaSpan


@dataclass(frozen=True)
class EncoderFit:
    """What a row may do.

    Attributes:
        tokens: how many of the asked-for tokens can run; 0 = not in this step.
        items: indexes of the media that those tokens touch and the request does not hold yet.
    """

    tokens: int
    items: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncoderWork:
    """The encoder part of a plan.

    Attributes:
        frees: for `StepPlan.encoder_frees`.
        encodes: for `StepPlan.encodes`.
    """

    frees: list[str]
    encodes: list[EncodeItem]


class EncoderGate:
    """The encoder budget of each step, over an `EncoderCache`.

    A step, for requests with media only: `fit` (as often as one likes), `take` once the row is certain, `undo` if it is
    un-planned, `close_step` when the plan is complete. After results: `advance`. At the end of a request's stay in its
    slot: `release`.
    """

    def __init__(self, *, cache_rows: int, budget_rows: int, lookahead_tokens: int = 0) -> None:
        """Make a gate with an empty cache.

        Args:
            cache_rows: rows that the worker keeps between steps.
            budget_rows: most rows that one step encodes; a larger item is refused.
            lookahead_tokens: a drafter reads embeddings that far behind the last confirmed token, so items are kept
                that much longer, but never when their request has reached its next item.
        """
        self.cache = EncoderCache(cache_rows, passing_rows=budget_rows)
        self._budget_rows = budget_rows
        self._lookahead_tokens = lookahead_tokens
        self._slots: dict[RequestId, Slot] = {}
        # Requests whose first row is planned; those of the step being planned apart, for `undo`.
        self._begun: set[RequestId] = set()
        self._beginning: set[RequestId] = set()

    def check(self, media: Sequence[MediaSpan], prompt_tokens: int) -> None:
        """Refuse media that can never run, or that do not belong to the prompt.

        Args:
            media: spans of one request.
            prompt_tokens: length of its prompt.

        Raises:
            MediaTooLargeError: an item has more rows than a whole step may encode.
            RequestError: spans out of order, overlapping, empty, or outside of the prompt.
        """
        end = 0
        for index, span in enumerate(media):
            out_of_place = span.start < end or span.start + span.tokens > prompt_tokens
            if span.tokens < 0 or span.rows < 1 or (span.tokens and out_of_place):
                raise RequestError(
                    f"media item {index} covers prompt positions {span.start} to {span.start + span.tokens - 1} with "
                    f"{span.rows} rows; items must be in order, not overlap, not be empty and lie within the "
                    f"{prompt_tokens} prompt tokens",
                    param="media",
                )
            end = max(end, span.start + span.tokens) if span.tokens else end
            if span.rows > self._budget_rows:
                raise MediaTooLargeError(
                    f"media item {index} has {span.rows} encoder rows and a step encodes at most {self._budget_rows}: "
                    "send a smaller item, or start the engine with a larger encoder budget",
                    param="media",
                )
        self._check_together(media)

    def _check_together(self, media: Sequence[MediaSpan]) -> None:
        """Refuse items that no step could have at once: the first row needs all those without positions, and one more.

        Raises:
            MediaTooLargeError: they need more than the budget of a step, or than the cache and what passes beside it.
        """
        first = {span.identifier: span.rows for span in media if not span.tokens}
        if not first:
            return
        for span in media:
            rows = list((first | {span.identifier: span.rows}).values())
            kept = sum(count for count in rows if count <= self.cache.capacity_rows)
            if sum(rows) > self._budget_rows or kept > self.cache.capacity_rows:
                raise MediaTooLargeError(
                    f"media items with {sum(rows)} encoder rows are needed at once, and a step encodes at most "
                    f"{self._budget_rows} and keeps at most {self.cache.capacity_rows}: send fewer or smaller items, "
                    "or start the engine with a larger encoder budget and cache",
                    param="media",
                )

    def fit(self, request_id: RequestId, media: Sequence[MediaSpan], start: int, tokens: int) -> EncoderFit:
        """Return how many of the tokens ``[start, start + tokens)`` may run in this step. Changes nothing.

        Apply it after every other cut: a shorter chunk may need fewer items. The result needs no rounding.

        Args:
            request_id: whose row.
            media: its spans.
            start: position of the first token.
            tokens: wanted, at least 1.
        """
        budget_rows = self._budget_rows - self.cache.fresh_rows
        wanted: dict[str, int] = {}
        items: list[int] = []
        for index, span in enumerate(media):
            if self.cache.holds(request_id, index) or not self._needs(request_id, span, start, tokens):
                continue
            rows = 0 if self.cache.has(span.identifier) or span.identifier in wanted else span.rows
            wanted.setdefault(span.identifier, span.rows)
            if rows > budget_rows or not self.cache.can_fit(wanted.items()):
                return EncoderFit(max(0, span.start - start) if span.tokens else 0, tuple(items))
            budget_rows -= rows
            items.append(index)
        return EncoderFit(tokens, tuple(items))

    def take(self, request_id: RequestId, slot: Slot, media: Sequence[MediaSpan], fit: EncoderFit) -> None:
        """Take the items of a row that is now planned.

        Args:
            request_id: whose row.
            slot: its slot.
            media: its spans.
            fit: of this step, with nothing taken in between.

        Mutates: the cache.
        """
        invariant(fit.tokens > 0, f"request {request_id} has no row to encode for")
        self._slots[request_id] = slot
        if request_id not in self._begun:
            self._begun.add(request_id)
            self._beginning.add(request_id)
        for index in fit.items:
            self.cache.allocate(request_id, index, media[index].identifier, media[index].rows)

    def undo(self, request_id: RequestId) -> None:
        """Take back what `take` took in this step: the row was un-planned, the request keeps its slot.

        Mutates: the cache.
        """
        self.cache.undo(request_id)
        if request_id in self._beginning:
            self._beginning.remove(request_id)
            self._begun.remove(request_id)

    def advance(self, request_id: RequestId, media: Sequence[MediaSpan], computed_tokens: int) -> None:
        """Give up the items that the request has passed.

        Args:
            request_id: whose.
            media: its spans.
            computed_tokens: tokens computed by steps whose results have been **applied**, never planned ones.

        Mutates: the cache.
        """
        for index in self.cache.uses_of(request_id):
            span = media[index]
            keep_until = span.start + span.tokens + self._lookahead_tokens
            next_start = next((later.start for later in media[index + 1 :] if later.tokens), keep_until)
            if not span.tokens or computed_tokens >= min(keep_until, next_start):
                self.cache.release(request_id, index)

    def distrust(self, request_id: RequestId, media: Sequence[MediaSpan]) -> None:
        """Let no other request use the outputs of a failed one. Call it before `release`.

        Args:
            request_id: whose row failed.
            media: its items.

        Mutates: the cache.
        """
        self.cache.distrust(request_id, [span.identifier for span in media])

    def release(self, request_id: RequestId) -> None:
        """Give up everything of a request that loses its slot: preempted, finished or aborted, planned or not.

        Mutates: the cache.
        """
        self.cache.release_all(request_id)
        self._slots.pop(request_id, None)
        self._begun.discard(request_id)
        self._beginning.discard(request_id)

    def close_step(self) -> EncoderWork:
        """Return the encoder part of the finished plan and open the next step.

        Mutates: the cache.
        """
        encodes = [
            EncodeItem(self._slots[owner], owner, use, identifier) for identifier, owner, use in self.cache.fresh()
        ]
        self._beginning.clear()
        return EncoderWork(self.cache.close_plan(), encodes)

    def _needs(self, request_id: RequestId, span: MediaSpan, start: int, tokens: int) -> bool:
        if not span.tokens:
            return request_id not in self._begun
        return span.start < start + tokens and span.start + span.tokens > start

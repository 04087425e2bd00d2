"""Finds stop strings in a text that arrives in pieces, and holds back only what could still become one.

Must not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches a stream for stop strings.

    The stop that is complete first wins; among those complete at the same character, the first of the list. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Start.

        Args:
            stops: not empty strings; the list may be empty.
            include: emit the stop string too.
        """
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece.

        Returns:
            The text that is safe to emit, and the stop string that ended the output or None. After a match nothing more
            is emitted.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        buffer = self._held + text
        ends = [
            (at + len(stop), position) for position, stop in enumerate(self._stops) if (at := buffer.find(stop)) >= 0
        ]
        if ends:
            end, position = min(ends)
            self._matched, self._held = self._stops[position], ""
            return buffer[: end if self._include else end - len(self._matched)], self._matched
        keep_from = min(self._prefix_start(buffer, stop) for stop in self._stops)
        self._held = buffer[keep_from:]
        return buffer[:keep_from], None

    def flush(self) -> str:
        """Return what was held back; the text is at its end and no stop string will be completed."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _prefix_start(buffer: str, stop: str) -> int:
        """Return where the longest end of ``buffer`` that begins ``stop`` starts; the length of ``buffer`` if none."""
        at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
        while at >= 0 and not stop.startswith(buffer[at:]):
            at = buffer.find(stop[0], at + 1)
        return at if at >= 0 else len(buffer)

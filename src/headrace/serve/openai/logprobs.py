"""Log-probabilities in the shapes of the API: classic lists, chat objects, vLLM's prompt entries.

Must not compute probabilities.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.request_output import TokenEntry

_NO_CHANCE = -9999.0
"""JSON has no minus infinity; this is what OpenAI sends in its place."""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else _NO_CHANCE


def token_label(token_id: int, raw: bytes, text: str, as_id: bool) -> str:
    r"""Name a token: its text, ``bytes:\xf0\x9f`` if it is a part of a character, or ``token_id:N`` on request."""
    if as_id:
        return f"token_id:{token_id}"
    try:
        return raw.decode("utf-8") if raw else text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ClassicLogprobs:
    """Builds the classic lists; remembers the text offset from one chunk to the next.

    Args:
        as_ids: show tokens as ``token_id:N``.
        hidden_ids: tokens that are left out of the text (special tokens), so that they take no room in it.
        offset: characters of text before the first token.
    """

    def __init__(self, *, as_ids: bool, hidden_ids: frozenset[int], offset: int = 0) -> None:
        self._as_ids = as_ids
        self._hidden_ids = hidden_ids
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(
        self, entries: Sequence[TokenEntry | None], *, top: int, unscored: Sequence[tuple[int, bytes, str]] = ()
    ) -> dict[str, list[Any]]:
        """Return the lists for the next tokens.

        Args:
            entries: scored tokens; None for a token without a score (the first of a prompt).
            top: alternatives asked for; 0 leaves only the chosen token.
            unscored: (id, bytes, text) of the tokens whose entry is None, in order.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        missing = iter(unscored)
        for entry in entries:
            offsets.append(self._offset)
            if entry is None:
                token_id, raw, text = next(missing)
                logprobs.append(None)
                tops.append(None)
            else:
                token_id, raw, text = entry.token_id, entry.bytes, entry.text
                logprobs.append(finite(entry.logprob))
                tops.append(self._alternatives(entry, top))
            tokens.append(token_label(token_id, raw, text, self._as_ids))
            if token_id not in self._hidden_ids:
                self._offset += len(self._decoder.decode(raw))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _alternatives(self, entry: TokenEntry, top: int) -> dict[str, float]:
        chosen = token_label(entry.token_id, entry.bytes, entry.text, self._as_ids)
        shown: dict[str, float] = {}
        for token_id, text, raw, logprob in entry.top[:top]:
            # Two tokens can have one text; the likelier comes first and stays.
            shown.setdefault(token_label(token_id, raw, text, self._as_ids), finite(logprob))
        shown.setdefault(chosen, finite(entry.logprob))
        return shown


def chat_logprobs(entries: Sequence[TokenEntry], *, top: int, as_ids: bool) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice."""
    content = []
    for entry in entries:
        shown = _chat_token(entry.token_id, entry.bytes, entry.text, entry.logprob, as_ids)
        shown["top_logprobs"] = [
            _chat_token(token_id, raw, text, logprob, as_ids) for token_id, text, raw, logprob in entry.top[:top]
        ]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, raw: bytes, text: str, logprob: float, as_ids: bool) -> dict[str, Any]:
    return {"token": token_label(token_id, raw, text, as_ids), "logprob": finite(logprob), "bytes": list(raw)}


def prompt_entries(entries: Sequence[TokenEntry | None], *, top: int, as_ids: bool) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: for each prompt token a map from token id to log-probability and rank."""
    shown: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        row: dict[str, Any] = {}
        for rank, (token_id, text, raw, logprob) in enumerate(entry.top[:top], start=1):
            row[str(token_id)] = _prompt_token(token_id, raw, text, logprob, rank, as_ids)
        row.setdefault(
            str(entry.token_id),
            _prompt_token(entry.token_id, entry.bytes, entry.text, entry.logprob, entry.rank, as_ids),
        )
        shown.append(row)
    return shown


def _prompt_token(token_id: int, raw: bytes, text: str, logprob: float, rank: int, as_ids: bool) -> dict[str, Any]:
    label = token_label(token_id, raw, text, as_ids)
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": label}

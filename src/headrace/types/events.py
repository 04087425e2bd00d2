"""What enters the scheduler from outside: its inbox is a list of these, taken once a step and in order."""

from __future__ import annotations

import msgspec

from headrace.base.ids import RequestId
from headrace.types.outputs import ErrorRecord
from headrace.types.requests import EngineRequest


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A new request."""

    request: EngineRequest


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The client is gone or a stop string ended the text. Unknown and finished ids are ignored.

    The abort is silent: no delta is sent for it.
    """

    request_id: RequestId


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefix_cache"):
    """Forget every cached block that no request uses."""


class GrammarReady(msgspec.Struct, frozen=True, array_like=True, tag="grammar"):
    """The grammar of a request is compiled, or cannot be. Unknown and finished ids are ignored."""

    request_id: RequestId
    error: ErrorRecord | None = None


class LookupDone(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Some lookup of a store has an answer: requests that were told "ask later" may ask again."""

    request_id: RequestId


class JobDone(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    """A job has ended on every rank; its blocks are no longer touched. Sent exactly once a job, whatever happened.

    Attributes:
        job_id: of the `LoadJob`.
        valid_tokens: the range is good up to this position; ``start_tokens`` of the job if nothing is.
    """

    job_id: int
    valid_tokens: int


InboxEvent = AddRequest | AbortRequest | ResetPrefixCache | GrammarReady | LookupDone | JobDone

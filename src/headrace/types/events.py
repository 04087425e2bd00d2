"""What enters the scheduler from outside: its inbox is a list of these, taken once a step and in order."""

from __future__ import annotations

import msgspec

from headrace.base.ids import RequestId
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


InboxEvent = AddRequest | AbortRequest | ResetPrefixCache

"""What the client remembers about an unfinished request, so that a new core can go on with it. Must not do I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from headrace.base.ids import RequestId
from headrace.engine.delta_stream import DeltaStream
from headrace.types.outputs import RequestDelta
from headrace.types.requests import EngineRequest


@dataclass
class PendingRequest:
    """One unfinished request.

    Attributes:
        request: as it was first submitted.
        stream: where its deltas go.
        produced: output tokens received so far, whether the client has read them or not.
        prompt_entries: prompt log-probabilities received so far.
    """

    request: EngineRequest
    stream: DeltaStream
    produced: list[int] = field(default_factory=list)
    prompt_entries: int = 0
    _repeated_entries: int = 0

    def resubmission(self, with_core: Collection[RequestId]) -> EngineRequest:
        """Return the request that continues this one in a new core: same id, same seed, tokens so far as produced.

        Args:
            with_core: requests that the new core gets or has. It goes on waiting for its leader only if that is one.

        Mutates: how many prompt log-probabilities of the new life are repetitions.
        """
        request = self.request
        sampling = request.sampling
        if self.prompt_entries >= len(request.prompt_token_ids) - 1:
            sampling = sampling.replace(prompt_logprobs=None)
        self._repeated_entries = self.prompt_entries
        return msgspec.structs.replace(
            request,
            sampling=sampling,
            produced_token_ids=[*request.produced_token_ids, *self.produced],
            leader_id=request.leader_id if request.leader_id in with_core else None,
        )

    def take(self, delta: RequestDelta) -> RequestDelta:
        """Account for a delta; return it without the prompt log-probabilities that an earlier life has delivered."""
        self.produced.extend(delta.new_token_ids)
        entries = delta.prompt_logprobs
        if not entries:
            return delta
        repeated = min(self._repeated_entries, len(entries))
        self._repeated_entries -= repeated
        self.prompt_entries += len(entries) - repeated
        return msgspec.structs.replace(delta, prompt_logprobs=entries[repeated:] or None) if repeated else delta

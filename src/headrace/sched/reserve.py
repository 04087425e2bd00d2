"""What admission must leave free: a watermark, prompts half computed, and a share of what the running may still write.

The share adapts, and only to what is planned here, so it is the same in every replay. Nobody knows how long an answer
will be: to reserve ``max_tokens`` of each request wastes most of the memory, to reserve nothing admits so many that
they take each other's blocks and compute everything twice. So the share decays with every step in which nobody was
preempted, and grows by half in a step in which somebody was. (A decaying ratio is the idea of SGLang's "new token
ratio".) Must not look at free blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.kv.budget import group_need_blocks
from headrace.kv.coordinator import KvCoordinator
from headrace.sched.request import Request
from headrace.types.cache_specs import GroupLayout, kind_of

FIRST_SHARE = 0.25
LEAST_RAISED_SHARE = 0.1
RAISE = 1.5
DECAY = 0.98
"""A step without preemption: 35 steps halve the share.

Chosen on random answers of 8 to 200 tokens with limits two to four times as long: a tenth more steps than with no
reserve at all, and a quarter of the tokens that are computed twice then; reserving everything takes three times the
steps.
"""
NEGLIGIBLE_SHARE = 0.002
HORIZON_TOKENS = 4096
"""Further than that nothing is reserved: a limit of 100k tokens says nothing about the answer."""
_NEVER_TOKENS = 1 << 62


class FutureUse:
    """The adaptive share, and the bound of what each group's tables grow to."""

    def __init__(
        self,
        kv: KvCoordinator,
        groups: Sequence[GroupLayout],
        *,
        watermark: float,
        max_model_len: int,
        batch_tokens: int,
        in_flight: int,
    ) -> None:
        """Begin with a moderate share.

        Args:
            kv: block tables.
            groups: of the layout.
            watermark: share of memory that is kept free; divided evenly among the groups.
            max_model_len: longest sequence in tokens.
            batch_tokens: most tokens of one sequence in one step.
            in_flight: plans made before the first result is applied.
        """
        self._kv = kv
        self.share = FIRST_SHARE
        self.watermark_blocks = [int(watermark * (group.num_blocks - 1) / len(groups)) for group in groups]
        self._block_tokens = [group.block_tokens for group in groups]
        self._bounds_tokens: list[int] = []
        for group in groups:
            most = group_need_blocks(group, max_model_len, batch_tokens=batch_tokens, in_flight=in_flight)
            if kind_of(group.spec) in ("recurrent", "cross"):
                self._bounds_tokens.append(0)
            elif most < -(-max_model_len // group.block_tokens):
                self._bounds_tokens.append(most * group.block_tokens)
            else:
                self._bounds_tokens.append(_NEVER_TOKENS)
        self._bounded = any(bound < _NEVER_TOKENS for bound in self._bounds_tokens)

    def settle(self, *, preempted: bool, running: bool) -> None:
        """Adapt the share at the end of a pass.

        Args:
            preempted: somebody lost its blocks in this pass.
            running: somebody runs; an idle engine learns nothing.

        Mutates: the share.
        """
        if preempted:
            self.share = min(1.0, max(LEAST_RAISED_SHARE, RAISE * self.share))
        elif running:
            self.share = self.share * DECAY if self.share > NEGLIGIBLE_SHARE else 0.0

    def claims(self, holders: Iterable[Request]) -> Claims:
        """Return what those who hold blocks will still take.

        Args:
            holders: requests with blocks, running or not.
        """
        claims = Claims(list(self.watermark_blocks), [0] * len(self._bounds_tokens), self)
        for request in holders:
            claims.add(request)
        return claims

    def growth_tokens(self, request: Request) -> list[int]:
        """Return per group by how many tokens the tables of a request may still grow."""
        known = request.known_tokens
        more = min(request.limit_tokens - known, HORIZON_TOKENS)
        if not self._bounded:
            # One or many groups that keep everything: the common case, for each running request of a pass.
            return [more] * len(self._bounds_tokens)
        return [max(0, min(more, bound - known)) for bound in self._bounds_tokens]

    def missing_blocks(self, request: Request) -> list[int]:
        """Return per group what a request that holds blocks lacks for its known tokens."""
        return self._kv.missing_blocks(request.kv, request.known_tokens)

    def blocks_of(self, tokens: Sequence[int]) -> list[int]:
        """Return per group the share of so many tokens, in whole blocks."""
        return [
            int(self.share * count) // size if count else 0
            for count, size in zip(tokens, self._block_tokens, strict=True)
        ]


class Claims:
    """A sum over requests, added to as they start.

    Attributes:
        blocks: per group: the watermark and what is promised for certain.
        tokens: per group: what may come beyond that; a share of it is reserved.
    """

    __slots__ = ("_future", "blocks", "tokens")

    def __init__(self, blocks: list[int], tokens: list[int], future: FutureUse) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self._future = future

    def add(self, request: Request) -> None:
        """Add a request that holds blocks.

        Mutates: the sum.
        """
        if request.known_tokens > request.kv.covered_tokens:
            for index, missing in enumerate(self._future.missing_blocks(request)):
                self.blocks[index] += missing
        if self._future.share:
            more = self._future.growth_tokens(request)
            if len(more) == 1:
                self.tokens[0] += more[0]
            else:
                self.tokens = [have + some for have, some in zip(self.tokens, more, strict=True)]

    def kept_blocks(self, newcomer: Request) -> list[int]:
        """Return per group what must stay free when a request starts: all claims, and its own future share."""
        if not self._future.share:
            return self.blocks
        tokens = [have + more for have, more in zip(self.tokens, self._future.growth_tokens(newcomer), strict=True)]
        return [sure + maybe for sure, maybe in zip(self.blocks, self._future.blocks_of(tokens), strict=True)]

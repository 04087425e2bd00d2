"""Draws the requests of a run: prompts that share a trunk, and everything else that a request may bring.

Must not know what the engine does with them.
"""

from __future__ import annotations

import random

import msgspec

from headrace.base.ids import RequestId
from headrace.kv.prefix_hash import block_hashes, extras_of, root_of
from headrace.sim.faults import Faults
from headrace.sim.features import Features
from headrace.sim.oracle import embeds_digest, expected_output, media_name
from headrace.sim.setup import SimSetup
from headrace.types.requests import EmbedsSpan, EngineRequest, MediaSpan
from headrace.types.sampling import SamplingParams


class RequestSource:
    """Draws requests."""

    def __init__(
        self, rng: random.Random, setup: SimSetup, features: Features, faults: Faults, hash_tokens: int
    ) -> None:
        """Draw the trunk, the tenants and the items.

        Args:
            rng: where everything comes from.
            setup: sizes and options of the run.
            features: what requests may bring.
            faults: sites at which a request itself is the fault.
            hash_tokens: tokens under one prefix hash.
        """
        self._rng, self._setup, self._hash_tokens = rng, setup, hash_tokens
        self._features, self._faults = features, faults
        longest = min(setup.max_model_len, 400)
        self._trunk = [rng.randrange(setup.vocab_tokens) for _ in range(longest)]
        # Equal values of several kinds: only the tag of the kind keeps them apart.
        self._salts: list[str | None] = [None, "a", "b"] if features.salts else [None]
        self._adapters: list[bytes | None] = [None, b"a", b"b"] if features.adapters else [None]
        self._encoder_lengths = [rng.randint(1, 6) for _ in range(3)]
        self._items = [self._draw_item(number) for number in range(4)]
        # Long answers to short prompts take memory that admission did not count on: requests are preempted.
        self._long_answers = rng.random() < 0.5
        self._made = 0
        self._leader: EngineRequest | None = None

    def draw(self, now_s: float) -> EngineRequest:
        """Return the next request.

        Args:
            now_s: time of its arrival.
        """
        leader = self._leader
        if leader is not None and self._rng.random() < 0.5:
            return self._sibling(leader, now_s)
        rng, vocab = self._rng, self._setup.vocab_tokens
        prompt = self._prompt()
        most = rng.choice([8, 30, None]) if self._long_answers else rng.choice([1, 2, 5, 12, 12, 30, None])
        sampling = SamplingParams(
            max_tokens=most,
            min_tokens=rng.choice([0, 0, min(3, most or 3), most or 5]),
            ignore_eos=rng.random() < (0.9 if self._long_answers else 0.4),
            stop_token_ids=rng.choice([[], [], [rng.randrange(vocab)]]),
            prompt_logprobs=0 if self._features.logprobs and rng.random() < 0.2 else None,
            logprobs=0 if self._features.logprobs and rng.random() < 0.3 else None,
            seed=1,
        )
        self._made += 1
        media, encoder_tokens = self._media(prompt)
        source = EngineRequest(
            request_id=RequestId(f"r{self._made}"),
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=[vocab - 1] if rng.random() < 0.7 else [],
            arrival_s=now_s,
            priority=rng.randint(-1, 2),
            cache_salt=rng.choice(self._salts),
            tenant=rng.choice(["a", "b", "c", None]) if self._features.tenants else None,
            adapter=rng.choice(self._adapters),
            media=media,
            embeds=self._embeds(prompt),
            encoder_tokens=encoder_tokens,
            grammar=rng.choice(["x", "y"]) if self._features.grammars and rng.random() < 0.4 else None,
            deadline_s=self._deadline(now_s),
        )
        source = self._finished(source)
        self._leader = source if self._features.siblings and rng.random() < 0.3 else None
        return source

    def _finished(self, source: EngineRequest) -> EngineRequest:
        """Add what a front end computes."""
        where = source.request_id
        hashes = block_hashes(
            source.prompt_token_ids,
            self._hash_tokens,
            extras=extras_of(source),
            root=root_of(self._setup.hash_seed),
        )
        if self._faults.fires("hashes missing", where):
            hashes = hashes[: self._faults.roll("hashes", where) % (len(hashes) + 1)]
        source = msgspec.structs.replace(source, block_hashes=hashes)
        if source.prompt_token_ids and self._faults.fires("resubmitted", where):
            return self._resubmitted(source)
        return source

    def _prompt(self) -> list[int]:
        rng, longest = self._rng, self._setup.max_model_len
        deep = rng.random() < (0.2 if self._long_answers else 0.6)
        trunk_tokens = rng.randint(0, longest - 1) if deep else rng.randint(0, longest // 4)
        prompt = self._trunk[:trunk_tokens]
        prompt += [rng.randrange(self._setup.vocab_tokens) for _ in range(rng.randint(0, 3))]
        if self._faults.fires("never fits", self._made):
            return prompt + [0] * longest
        return prompt[: longest - 1] if rng.random() < 0.02 else (prompt or [0])[: longest - 1]

    def _sibling(self, leader: EngineRequest, now_s: float) -> EngineRequest:
        """Return one of several sequences that share a prompt (``n > 1``)."""
        self._made += 1
        if self._rng.random() < 0.5:
            self._leader = None
        sampling = leader.sampling.replace(max_tokens=self._rng.choice([2, 5, 12]), min_tokens=0)
        return msgspec.structs.replace(
            leader,
            request_id=RequestId(f"r{self._made}"),
            sampling=sampling,
            arrival_s=now_s,
            leader_id=leader.request_id,
            produced_token_ids=[],
        )

    def _draw_item(self, number: int) -> MediaSpan:
        rng = self._rng
        tokens = rng.choice([1, 2, 3, 5])
        rows = rng.randint(1, self._setup.encoder_budget_rows)
        return MediaSpan(media_name(number, tokens, rows), 0, tokens, rows)

    def _media(self, prompt: list[int]) -> tuple[list[MediaSpan], int]:
        rng, media = self._rng, []
        encoder_tokens = 0
        if "cross" in self._setup.kinds and rng.random() < 0.9:
            number = rng.randrange(len(self._encoder_lengths))
            encoder_tokens = self._encoder_lengths[number]
            if self._features.media and rng.random() < 0.8:
                rows = 1 + number % self._setup.encoder_budget_rows
                media.append(MediaSpan(media_name(10 + number, 0, rows), 0, 0, rows))
        if not self._features.media or rng.random() < 0.4:
            return media, encoder_tokens
        start = rng.randint(0, 3)
        for _ in range(rng.randint(1, 3)):
            item = rng.choice(self._items)
            rows = item.rows
            if self._faults.fires("oversized item", self._made, start):
                rows = self._setup.encoder_budget_rows + 1
            if start + item.tokens > len(prompt):
                break
            name = item.identifier if rows == item.rows else media_name(99, item.tokens, rows)
            media.append(MediaSpan(name, start, item.tokens, rows))
            start += item.tokens + rng.choice([0, 0, 1, 4])
        return media, encoder_tokens

    def _embeds(self, prompt: list[int]) -> list[EmbedsSpan]:
        rng = self._rng
        if not self._features.embeds or rng.random() < 0.6 or len(prompt) < 2:
            return []
        tokens = rng.randint(1, min(3, len(prompt)))
        start = rng.randint(0, len(prompt) - tokens)
        return [EmbedsSpan(embeds_digest(rng.randrange(2), tokens), start, tokens)]

    def _deadline(self, now_s: float) -> float | None:
        if not self._features.deadlines:
            return None
        if self._faults.fires("deadline near", self._made):
            return now_s + (0.0, 0.001, 0.003, 0.01, 0.03)[self._faults.roll("deadline", self._made) % 5]
        return now_s + 1000.0 if self._rng.random() < 0.5 else None

    def _resubmitted(self, source: EngineRequest) -> EngineRequest:
        """Return the request as it comes back after a crash, with a beginning of its output."""
        setup = self._setup
        full = expected_output(source, vocab_tokens=setup.vocab_tokens, max_model_len=setup.max_model_len).output_ids
        produced = full[: self._rng.randint(0, len(full))]
        return msgspec.structs.replace(source, produced_token_ids=produced)

"""A model without weights: a token's hidden state is a hash of all tokens before it, as found in the paged cache.

Wrong block tables, positions or chunks change the hash, so they change every answer after.
"""

from __future__ import annotations

import numpy as np
import torch

VOCAB = 50
BLOCK_TOKENS = 4
MODULUS = 1_000_003


def context_hash(token_ids) -> int:
    value = 7
    for token in token_ids:
        value = (value * 31 + int(token) + 1) % MODULUS
    return value


def logits_of(value: int) -> np.ndarray:
    return np.random.default_rng(value).normal(0, 3, VOCAB).astype(np.float32)


class FakeModel:
    """A model and its memory of one group.

    Attributes: poisoned: hashes whose logits are NaN; logit_rows: rows of each call of `logits`; done: what happened to
    the memory, in order.
    """

    groups = 1

    def __init__(self, blocks=64):
        self.memory = np.full((blocks, BLOCK_TOKENS), -1, np.int64)
        self.poisoned = set()
        self.logit_rows = []
        self.done = []

    def copy(self, copies):
        for copy in copies:
            self.done.append((copy.source, copy.target))
            self.memory[copy.target] = self.memory[copy.source]

    def observe(self, hidden):
        self.done.append("observe")

    def forward(self, token_ids, step):
        hidden, place = [], 0
        self.done.append("forward")
        batch = step.batches[0]
        for start, count, slot in zip(batch.starts, batch.tokens, batch.slots, strict=True):
            table = batch.tables[slot]
            for position in range(start, start + count):
                assert step.positions[place] == position
                self.memory[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = token_ids[place]
                context = [self.memory[table[p // BLOCK_TOKENS], p % BLOCK_TOKENS] for p in range(position + 1)]
                hidden.append([context_hash(context)])
                place += 1
        assert place == len(token_ids)
        return torch.tensor(hidden, dtype=torch.float64)

    def logits(self, hidden):
        self.logit_rows.append(len(hidden))
        rows = [
            np.full(VOCAB, np.nan, np.float32) if int(value) in self.poisoned else logits_of(int(value))
            for value in hidden[:, 0]
        ]
        return torch.from_numpy(np.stack(rows))

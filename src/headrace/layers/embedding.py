"""Token embedding and output head, split over ranks by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.base.errors import InvariantError
from headrace.layers.context import ModelContext
from headrace.layers.kernels import LinearKernel, make_kernel
from headrace.layers.linear import Targets
from headrace.weights.target import WeightTarget


class VocabTable:
    """Rows of this rank of a [vocabulary, H] matrix. The last rank may have padding rows of zeros.

    Args:
        context: where it runs.
        vocab_tokens: rows in the checkpoint.
        features: H.
    """

    def __init__(self, context: ModelContext, vocab_tokens: int, features: int) -> None:
        self.rows = -(-vocab_tokens // context.tp.size)
        self.first = self.rows * context.tp.rank
        self.used = max(0, min(self.rows, vocab_tokens - self.first))
        self._shape = (vocab_tokens, features)
        self.weight = torch.zeros(self.rows, features, dtype=context.dtype, device=context.device)

    def targets(self, name: str) -> Targets:
        """Return the checkpoint tensor ``name + ".weight"``."""

        def load(full: Tensor) -> None:
            self.weight[: self.used].copy_(full[self.first : self.first + self.used])

        return {f"{name}.weight": WeightTarget(self._shape, load)}


class TokenEmbedding:
    """Looks tokens up; with several ranks each adds the tokens it has.

    Args:
        context: where it runs.
        vocab_tokens: size of the vocabulary.
        features: H.
    """

    def __init__(self, context: ModelContext, vocab_tokens: int, features: int) -> None:
        self.table = VocabTable(context, vocab_tokens, features)
        self._tp = context.tp

    @property
    def held_bytes(self) -> int:
        """Bytes of the table on this rank."""
        return self.table.weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [T, H] for token_ids [T]; one all-reduce with several ranks."""
        if self._tp.size == 1:
            return F.embedding(token_ids, self.table.weight)
        local = token_ids - self.table.first
        elsewhere = (local < 0) | (local >= self.table.used)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.table.weight)
        return self._tp.all_reduce(found.masked_fill_(elsewhere[:, None], 0))


class OutputHead:
    """Logits over the whole vocabulary, gathered over the ranks.

    Args:
        context: where it runs.
        table: own rows, or the embedding's if the two are tied.
        vocab_tokens: size of the vocabulary.
    """

    def __init__(self, context: ModelContext, table: VocabTable, vocab_tokens: int) -> None:
        self._context = context
        self._table: VocabTable | None = table
        self._vocab_tokens = vocab_tokens
        self._kernel: LinearKernel | None = None
        self.held_bytes = 0
        """Bytes beyond a table that others hold too, once `finalize` has run."""

    def finalize(self, keep_table: bool) -> None:
        """Make the kernel from the loaded table.

        Args:
            keep_table: the table is tied to the embedding.
        """
        if self._table is None:
            return
        self._kernel = make_kernel(self._table.weight, None, self._context)
        self.held_bytes = 0 if keep_table and self._kernel.keeps_weight else self._kernel.held_bytes
        if not keep_table:
            self._table.weight = self._table.weight.new_empty(0)
        self._table = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [R, vocabulary] for hidden [R, H]; one all-gather with several ranks."""
        if self._kernel is None:
            raise InvariantError("the output head is used before finalize()")
        local = self._kernel(hidden).float()
        if self._context.tp.size == 1:
            return local
        return self._context.tp.all_gather_last(local)[:, : self._vocab_tokens]

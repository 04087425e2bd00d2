"""Ranks as threads of one process: any number of them gives what one rank gives, with the same collectives on each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import Runner, oracle_logits, random_ids, reference
from torch import Tensor

from headrace.parallel.groups import TensorParallel


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadParallel(TensorParallel):
    """A group whose ranks are threads; notes what was called."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append(("reduce", tuple(tensor.shape)))
        return torch.stack(self._meeting.exchange(self.rank, tensor)).sum(0)

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        self.calls.append(("gather", tuple(tensor.shape)))
        return torch.cat(self._meeting.exchange(self.rank, tensor), -1)


def run_rank(oracle: Any, group: ThreadParallel, ids: list[int], changes: dict[str, Any]) -> Tensor:
    with torch.inference_mode():
        runner = Runner(oracle, tp=group, **changes)
        first = runner.logits([("a", ids[:17]), ("b", ids[:3])])["a"]
        rest = [runner.logits([("b", [1]), ("a", [token])])["a"] for token in ids[17:]]
        return torch.cat((first, *rest))


@pytest.mark.parametrize(
    ("case", "size", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 2, {"backend": "torch_exact"}),
        ("llama", 4, {}),  # more ranks than KV heads: two ranks hold the same head
        ("llama_one_kv_head", 2, {}),
        ("llama_tied_biased", 2, {}),
        ("qwen2", 2, {}),
        ("qwen3", 2, {}),
        ("qwen3_tied_biased", 4, {}),
        ("gemma3", 2, {}),
        ("gemma3_capped", 4, {}),
        ("llama4", 2, {}),
        ("llama4_no_norm", 4, {}),
        ("qwen3_next", 2, {}),
        ("qwen3_next_dense", 4, {"backend": "torch_exact"}),
    ],
)
def test_equals_one_rank(case: str, size: int, changes: dict[str, Any]) -> None:
    # A vocabulary that the ranks cannot share evenly.
    oracle = reference(case, vocab_size=253)
    ids = [token % 253 for token in random_ids(22, 4)]
    meeting = Meeting(size)
    groups = [ThreadParallel(rank, size, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(lambda group: run_rank(oracle, group, ids, changes), groups))
    for result in results:
        assert torch.equal(result, results[0]), "every rank has the same logits"
    torch.testing.assert_close(results[0], oracle_logits(oracle, ids), atol=1e-4, rtol=0)
    assert groups[0].calls, "the ranks did talk"
    assert all(group.calls == groups[0].calls for group in groups)


def test_one_rank_needs_no_collectives() -> None:
    alone = TensorParallel()
    tensor = torch.ones(2)
    assert alone.all_reduce(tensor) is tensor
    assert alone.all_gather_last(tensor) is tensor

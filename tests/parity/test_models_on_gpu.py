"""The same model code on a GPU: equal to transformers in fp32, near it in half; a poisoned cache stays apart."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, Runner, oracle_logits, random_ids, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = {"a": 40, "b": 9, "c": 133}


def run(case: str, dtype: torch.dtype, poison: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    oracle = reference(case)
    prompts = {name: random_ids(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}
    runner = Runner(oracle, dtype=dtype, device=torch.device("cuda"))
    if poison:
        null_bytes = runner.layout.null_granules * runner.layout.granule_bytes
        runner.arena.memory[null_bytes:].fill_(255)  # no number in any type
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    for sizes in ({"a": 30, "b": 5}, {"a": 1, "c": 100}, {"c": 30, "a": 2, "b": 1}, {"a": 1, "b": 1, "c": 1}):
        step = [(name, prompts[name][runner.done.get(name, 0) :][:count]) for name, count in sizes.items()]
        for name, logits in runner.logits(step).items():
            got[name].append(logits)
    ours = torch.cat([torch.cat(parts) for parts in got.values()]).cpu()
    counts = {name: sum(len(part) for part in parts) for name, parts in got.items()}
    theirs = torch.cat([oracle_logits(oracle, ids)[: counts[name]] for name, ids in prompts.items()])
    return ours, theirs


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_float32(case: str, poison: bool) -> None:
    ours, theirs = run(case, torch.float32, poison)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "qwen2_tied", "qwen3", "gemma3"])
def test_half(case: str, dtype: torch.dtype) -> None:
    ours, theirs = run(case, dtype)
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() / theirs.norm() < 0.06

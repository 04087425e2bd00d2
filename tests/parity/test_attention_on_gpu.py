"""The fast backend on a GPU against the plain reference: every mask, on poisoned memory, with odd granules."""

from __future__ import annotations

import pytest
import torch
from test_attention_backends import BATCHES, MASKS, Scene, check

from headrace.attention.contract import Scoring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("granule_bytes", [0, 1000])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_reference(mask: str, granule_bytes: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for batch in BATCHES.values():
        for dtype, bound in ((torch.float32, 5e-5), (torch.bfloat16, 6e-2)):
            scene = Scene(
                "torch_sdpa", (6, 2, 16), 4, dtype, MASKS[mask], poisoned=True, granule_bytes=granule_bytes, device=CUDA
            )
            check(scene, batch, bound)


@pytest.mark.parametrize("mask", ["full", "window 16", "chunk 33"])
def test_soft_cap_and_sinks(mask: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in ("decodes", "chunks", "mixed"):
        scene = Scene("torch_sdpa", (6, 2, 16), 4, reach=MASKS[mask], poisoned=True, device=CUDA)
        check(scene, BATCHES[name], 5e-5, Scoring(1.7, 2.5, scene.random(6) * 2))

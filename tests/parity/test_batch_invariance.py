"""CPU fp32: a row's bits are the same alone, in a batch of 20, in other chunks, and on a cached prefix."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Runner, random_ids, reference

from headrace.ops.activation.eager import silu_mul_invariant
from headrace.ops.linear import packed
from headrace.ops.linear.plain import TiledLinear
from headrace.ops.norm.eager import head_rms_norm, rms_norm

SMOLLM2_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 576)]
ODD_SHAPES = [(33, 48), (112, 64), (7, 1000), (2560, 2048)]
threads = pytest.mark.parametrize("threads", [1, 2])


@threads
@pytest.mark.parametrize("case", ["llama", "llama_tied_biased", "mistral", "qwen2_tied", "qwen3"])
def test_whole_model(case: str, threads: int) -> None:
    torch.set_num_threads(threads)
    oracle = reference(case)
    ids = random_ids(150, 1)
    alone = Runner(oracle, backend="torch_exact")
    want = alone.logits([("a", ids[:140])])["a"]
    want = torch.cat((want, *(alone.logits([("a", [token])])["a"] for token in ids[140:])))

    # Other chunks, beside 19 other rows at other places.
    batch = Runner(oracle, backend="torch_exact", shuffle_seed=9)
    others = [(f"o{i}", random_ids(2 + 3 * i, 50 + i)) for i in range(19)]
    got = [batch.logits([*others[:7], ("a", ids[:33]), *others[7:]])["a"]]
    at = 33
    for size in (1, 1, 64, 41, 10):
        beside = [(name, random_ids(1, at)) for name, _ in others]
        rows = [*beside[: at % 19], ("a", ids[at : at + size]), *beside[at % 19 :]]
        got.append(batch.logits(rows)["a"])
        at += size
    assert torch.equal(torch.cat(got), want)

    # A prefix that another row has computed in one piece.
    hit = Runner(oracle, backend="torch_exact", shuffle_seed=4)
    hit.hidden([("a", ids)])
    hit.share_prefix("a", "b", 64)
    tail = torch.cat((hit.logits([("b", ids[64:100])])["b"], hit.logits([("b", ids[100:])])["b"]))
    assert torch.equal(tail, want[64:])


@threads
@pytest.mark.parametrize("shape", SMOLLM2_SHAPES + ODD_SHAPES)
def test_packed_linear(shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    assert packed.is_available(torch.float32)
    assert packed.keeps_bits(*shape)
    weight, x = torch.randn(shape) / 20, torch.randn(130, shape[1])
    linear = packed.PackedLinear(weight, None, invariant=True)
    whole = linear(x)
    for rows in (1, 2, 3, 9, 20, 31, 64, 127):
        assert torch.equal(linear(x[5 : 5 + rows].clone()), whole[5 : 5 + rows][: 130 - 5])


@threads
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (33, 48)])
def test_tiled_linear(shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    weight, x = torch.randn(shape) / 20, torch.randn(50, shape[1])
    linear = TiledLinear(weight, torch.randn(shape[0]))
    whole = linear(x)
    for first, rows in ((0, 1), (3, 1), (7, 15), (1, 17), (18, 32)):
        assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows])


@threads
@pytest.mark.parametrize("width", [1, 31, 576, 1536, 11008, 40000])
def test_activation(width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(23, 2 * width) * 3
    whole = silu_mul_invariant(x.clone())
    for first, rows in ((0, 1), (22, 1), (3, 7), (1, 20)):
        assert torch.equal(silu_mul_invariant(x[first : first + rows].clone()), whole[first : first + rows])


@threads
@pytest.mark.parametrize("width", [3, 64, 576, 2048, 5000])
def test_norms(width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight = torch.randn(90, width), torch.randn(width)
    whole = rms_norm(x, weight, 1e-5)
    for first, rows in ((0, 1), (89, 1), (3, 7), (1, 64)):
        assert torch.equal(rms_norm(x[first : first + rows].clone(), weight, 1e-5), whole[first : first + rows])
    heads, head_weight = torch.randn(90, 5, width), torch.randn(5, width)
    whole = head_rms_norm(heads, head_weight, 1e-6)
    assert torch.equal(head_rms_norm(heads[17:18].clone(), head_weight, 1e-6), whole[17:18])

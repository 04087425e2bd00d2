"""The int8 path: error bounds, independence of rows, no warnings, whole model near fp32."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tiny_models import Runner, oracle_logits, random_ids, reference

from headrace.ops.linear import int8
from headrace.ops.linear.reference import linear, linear_int8

pytestmark = pytest.mark.skipif(not int8.is_available(), reason="this build of torch has no FBGEMM")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (33, 48), (7, 1000), (960, 576)])
def test_near_the_reference(shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape) / math.sqrt(shape[1])
    bias = torch.randn(shape[0]) if biased else None
    kernel = int8.Int8Linear(weight, bias)
    for rows in (1, 2, 7, 33):
        x = torch.randn(rows, shape[1])
        got, exact = kernel(x), linear(x, weight, bias)
        assert torch.isfinite(got).all()
        # Rounding x to 8 bits: at most half a step of its row, times the sum of weights; the same for the weight.
        step = (x.amax(1, keepdim=True).clamp(min=0) - x.amin(1, keepdim=True).clamp(max=0)).clamp(
            min=0
        ) / 255 + x.abs().amax(1, keepdim=True) / 127
        bound = step * weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * weight.abs().amax(1) / 127
        assert ((got - exact).abs() <= bound + 1e-5).all()
        if shape[1] >= 48:
            own = linear_int8(x, weight) + (0 if bias is None else bias)
            assert (got - exact).norm() < 2 * (own - exact).norm() + 1e-4


def test_a_large_row_does_not_rob_the_others() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(64, 96), torch.randn(8, 96)
    kernel = int8.Int8Linear(weight, None)
    beside = x.clone()
    beside[0] *= 3000
    exact = linear(x, weight)
    error = (kernel(beside)[1:] - exact[1:]).norm() / exact[1:].norm()
    assert error < 0.02


@pytest.mark.parametrize("length", [5, 96, 576])
def test_a_row_has_the_same_bits_alone_and_beside_others(length: int) -> None:
    torch.manual_seed(4)
    kernel = int8.Int8Linear(torch.randn(64, length), torch.randn(64))
    x = torch.randn(9, length)
    x[1] = x[1].abs()  # a row of one sign, whose own range is half as wide
    x[3] *= 3000
    together = kernel(x)
    for row in range(len(x)):
        assert torch.equal(kernel(x[row : row + 1])[0], together[row])
    assert torch.equal(kernel(x[:4]), together[:4])
    with torch.inference_mode():
        assert torch.equal(kernel(x[:5]), together[:5])
    assert torch.equal(kernel(x[:5]), together[:5])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_does_not_spoil_the_others(bad: float) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(64, 96), torch.randn(6, 96)
    kernel = int8.Int8Linear(weight, None)
    x[2, 5] = bad
    got = kernel(x)
    good = [0, 1, 3, 4, 5]
    exact = linear(x[good], weight)
    assert (got[good] - exact).norm() / exact.norm() < 0.02
    assert not torch.isfinite(got[2]).all(), "the fault must stay visible"
    assert not torch.isfinite(kernel(x[2:3])).all()


def test_zero_rows() -> None:
    kernel = int8.Int8Linear(torch.randn(5, 9), None)
    assert not kernel(torch.zeros(1, 9)).any()
    assert not kernel(torch.zeros(3, 9)).any()


def test_packing_is_silent_and_leaves_the_engine_alone() -> None:
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        int8.Int8Linear(torch.randn(5, 9), None)(torch.randn(2, 9))
    assert torch.backends.quantized.engine == engine


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3_tied_biased", "gemma3", "llama4", "qwen3_next"])
def test_whole_model_stays_near(case: str) -> None:
    oracle = reference(case)
    ids = random_ids(60)
    want = oracle_logits(oracle, ids)
    runner = Runner(oracle, quantization="int8")
    got = [runner.logits([("a", ids[:30])])["a"]]
    got.extend(runner.logits([("a", [token])])["a"] for token in ids[30:])
    errors = (torch.cat(got) - want).norm(dim=1) / want.norm(dim=1)
    # Near a tie a router may choose another expert for a token.
    error = errors.median() if runner.model.decoder.experts else (errors.square().mean()).sqrt()
    assert 0 < error < 0.12

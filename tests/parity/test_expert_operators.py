"""Mixtures of experts against their reference, and the bits of a token beside others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.activation.eager import silu_mul_invariant
from headrace.ops.linear.plain import TiledLinear
from headrace.ops.moe import grouped, reference

EXPERTS, WIDTH, INNER = 7, 24, 18


def weights_of(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=generator) / WIDTH**0.5
    return gate_up, torch.randn(EXPERTS, WIDTH, INNER, generator=generator) / INNER**0.5


def expert(gate_up: Tensor, down: Tensor) -> Callable[[Tensor], Tensor]:
    first, last = TiledLinear(gate_up, None), TiledLinear(down, None)
    return lambda x: last(silu_mul_invariant(first(x)))


@pytest.mark.parametrize("top_k", [1, 2, 7])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_softmax_on_the_output(tokens: int, top_k: int) -> None:
    gate_up, down = weights_of()
    x, logits = torch.randn(tokens, WIDTH), torch.randn(tokens, EXPERTS) * 2
    for renormalise in (False, True):
        want = reference.mixture(
            x, reference.softmax_weights(logits, top_k, renormalise), gate_up, down, on_input=False
        )
        weights, chosen = grouped.route_softmax(logits, top_k, renormalise)
        got = grouped.mixture(x, weights, chosen, list(map(expert, gate_up, down)), on_input=False)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3])
def test_sigmoid_on_the_input(top_k: int) -> None:
    gate_up, down = weights_of()
    x, logits = torch.randn(19, WIDTH), torch.randn(19, EXPERTS) * 2
    want = reference.mixture(x, reference.sigmoid_weights(logits, top_k), gate_up, down, on_input=True)
    weights, chosen = grouped.route_sigmoid(logits, top_k)
    got = grouped.mixture(x, weights, chosen, list(map(expert, gate_up, down)), on_input=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(
        got, grouped.mixture(x, weights, chosen, list(map(expert, gate_up, down)), on_input=False)
    )


def test_only_chosen_experts_run() -> None:
    ran = []

    def spy(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: ran.append((index, x.shape[0])) or x

    chosen = torch.tensor([[4, 1], [1, 4], [1, 6]])
    grouped.mixture(torch.randn(3, WIDTH), torch.rand(3, 2), chosen, [spy(i) for i in range(EXPERTS)], on_input=False)
    assert ran == [(1, 3), (4, 2), (6, 1)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_token_has_the_same_bits_beside_others(router: str, threads: int) -> None:
    torch.set_num_threads(threads)
    experts = list(map(expert, *weights_of()))
    x = torch.randn(60, WIDTH)
    gate = TiledLinear(torch.randn(EXPERTS, WIDTH), None)

    def run(part: Tensor) -> Tensor:
        logits = gate(part)
        routed = grouped.route_softmax(logits, 3, True) if router == "softmax" else grouped.route_sigmoid(logits, 1)
        return grouped.mixture(part, *routed, experts, on_input=router == "sigmoid")

    whole = run(x)
    for first, rows in ((0, 1), (59, 1), (7, 20), (13, 2), (1, 59)):
        assert torch.equal(run(x[first : first + rows].clone()), whole[first : first + rows])
    assert F.mse_loss(whole, x) > 0

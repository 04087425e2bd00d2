"""Causal convolution and gated delta rule against their references, at odd sizes, in pieces, and by their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.recurrent import conv, delta, reference


def delta_inputs(tokens: int, heads: int = 3, key: int = 12, value: int = 20, seed: int = 0) -> delta.DeltaInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(tokens, heads, key), dim=-1) for _ in range(2))
    decay = -torch.nn.functional.softplus(normal(tokens, heads) * 3)
    return delta.DeltaInputs(q, k, normal(tokens, heads, value), decay, torch.sigmoid(normal(tokens, heads)))


def state_of(inputs: delta.DeltaInputs, seed: int = 9) -> Tensor:
    (_, heads, key), value = inputs.q.shape, inputs.v.shape[2]
    return torch.randn(heads, key, value, generator=torch.Generator().manual_seed(seed))


def near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunked_delta_rule(tokens: int) -> None:
    inputs = delta_inputs(tokens)
    want, state_after = reference.gated_delta_rule(*inputs, state_of(inputs))
    state = state_of(inputs)
    near(delta.chunked(inputs, state), want)
    near(state, state_after)


def test_strong_decay_stays_finite() -> None:
    inputs = delta_inputs(130)
    inputs = inputs._replace(log_decay=inputs.log_decay * 200)
    want, state_after = reference.gated_delta_rule(*inputs, state_of(inputs))
    state = state_of(inputs)
    near(delta.chunked(inputs, state), want)
    near(state, state_after)


def test_one_token_of_many_rows() -> None:
    rows = [delta_inputs(1, seed=seed) for seed in range(5)]
    states = torch.stack([state_of(row, seed) for seed, row in enumerate(rows)])
    want = [reference.gated_delta_rule(*row, states[index]) for index, row in enumerate(rows)]
    out = delta.step(delta.DeltaInputs(*map(torch.cat, zip(*rows, strict=True))), states)
    near(out, torch.cat([o for o, _ in want]))
    near(states, torch.stack([s for _, s in want]))


@pytest.mark.parametrize("threads", [1, 2])
def test_scan_gives_the_same_bits_in_any_pieces(threads: int) -> None:
    torch.set_num_threads(threads)
    inputs = delta_inputs(50, heads=5, key=16, value=33)
    whole_state = state_of(inputs)
    whole = delta.scan(inputs, whole_state)
    want, _ = reference.gated_delta_rule(*inputs, state_of(inputs))
    near(whole, want)
    state, got = state_of(inputs), []
    for first, last in ((0, 1), (1, 20), (20, 21), (21, 50)):
        got.append(delta.scan(inputs.part(slice(first, last)), state))
        state = state.clone()
    assert torch.equal(torch.cat(got), whole)
    assert torch.equal(state, whole_state)


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_of_rows(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    channels, tokens = 21, [1, 5, 2, 1, 30]
    x = torch.randn(sum(tokens), channels, generator=generator)
    weight = torch.randn(channels, width, generator=generator)
    tails = torch.randn(len(tokens), width - 1, channels, generator=generator)
    plan = conv.plan_conv(tokens, width, torch.device("cpu"))
    out, after = conv.causal_conv(x, weight.t().contiguous(), tails, plan, invariant=False)
    for row, part in enumerate(x.split(tokens)):
        want, tail = reference.causal_conv(part, weight, tails[row])
        near(out.split(tokens)[row], want)
        assert torch.equal(after[row], tail)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels", [3, 96, 5000])
def test_convolution_gives_the_same_bits_beside_other_rows(channels: int, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(2)
    tokens = [3, 1, 20, 7]
    x = torch.randn(sum(tokens), channels, generator=generator)
    weight = torch.randn(4, channels, generator=generator)
    tails = torch.randn(len(tokens), 3, channels, generator=generator)
    plan = conv.plan_conv(tokens, 4, torch.device("cpu"))
    out, after = conv.causal_conv(x, weight, tails, plan, invariant=True)
    first = 0
    for row, count in enumerate(tokens):
        pieces = [1] * count if row == 2 else [count]
        tail, got = tails[row : row + 1], []
        for part in x[first : first + count].split(pieces):
            alone = conv.plan_conv([part.shape[0]], 4, torch.device("cpu"))
            piece, tail = conv.causal_conv(part.clone(), weight, tail, alone, invariant=True)
            got.append(piece)
        assert torch.equal(torch.cat(got), out[first : first + count])
        assert torch.equal(tail[0], after[row])
        first += count

"""CPU fp32: a row's bits are the same alone, in a batch of 20, in other chunks, and on a cached prefix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import FAMILIES, Runner, random_ids, reference

from headrace.layers.context import ModelContext
from headrace.layers.kernels import make_kernel
from headrace.ops.activation.eager import gelu_mul_invariant, silu_mul_invariant
from headrace.ops.activation.rows import by_rows
from headrace.ops.linear import packed, plain
from headrace.ops.linear.plain import TiledLinear, proven_heights
from headrace.ops.norm.eager import head_rms_norm, rms_norm
from headrace.parallel.groups import TensorParallel

SMOLLM2_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 576)]
ODD_SHAPES = [(33, 48), (112, 64), (7, 1000), (2560, 2048)]
threads = pytest.mark.parametrize("threads", [1, 2])


@threads
@pytest.mark.parametrize("case", ["llama", "llama_tied_biased", "mistral", "qwen2_tied", "qwen3", *FAMILIES])
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
    hit.hidden([("a", ids[:64])])
    hit.share_prefix("a", "b", 64)
    hit.hidden([("a", ids[64:])])
    tail = torch.cat((hit.logits([("b", ids[64:100])])["b"], hit.logits([("b", ids[100:])])["b"]))
    assert torch.equal(tail, want[64:])


def check_linear(linear: object, columns: int) -> None:
    x = torch.randn(300, columns)
    whole = linear(x)  # type: ignore[operator]
    for first, rows in ((0, 1), (7, 1), (5, 2), (1, 15), (3, 20), (40, 64), (2, 127), (11, 260)):
        part = linear(x[first : first + rows].clone())  # type: ignore[operator]
        assert torch.equal(part, whole[first : first + rows]), (first, rows)


@threads
@pytest.mark.parametrize("shape", SMOLLM2_SHAPES + ODD_SHAPES)
def test_chosen_linear(shape: tuple[int, int], threads: int) -> None:
    """Whichever kernel this build of torch deserves: packed where it proves itself, else tiles."""
    torch.set_num_threads(threads)
    context = ModelContext(torch.float32, torch.device("cpu"), TensorParallel(), "none", True)
    kernel = make_kernel(torch.randn(shape) / 20, torch.randn(shape[0]), context)
    proven = packed.is_available(torch.float32) and packed.keeps_bits(*shape)
    assert isinstance(kernel, packed.PackedLinear if proven else TiledLinear)
    check_linear(kernel, shape[1])


@threads
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (33, 48)])
def test_tiled_linear(shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    kernel = TiledLinear(torch.randn(shape) / 20, torch.randn(shape[0]))
    assert proven_heights(*shape)[0] == 16
    check_linear(kernel, shape[1])


def test_a_height_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = plain.F.linear

    def sloppy(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return exact(x, *rest) + (1e-6 if x.shape[0] == 64 else 0)

    monkeypatch.setattr(plain.F, "linear", sloppy)
    assert 64 not in proven_heights(11, 13)


def test_a_packed_kernel_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = packed.PackedLinear._run

    def sloppy(self: packed.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return exact(self, x) + (1e-6 if x.shape[0] == 33 else 0)

    monkeypatch.setattr(packed.PackedLinear, "_run", sloppy)
    assert not packed.keeps_bits(12, 13)


@threads
@pytest.mark.parametrize("width", [1, 31, 576, 1536, 11008, 40000])
@pytest.mark.parametrize("activate", [silu_mul_invariant, gelu_mul_invariant])
def test_activation(activate: Callable[[torch.Tensor], torch.Tensor], width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(23, 2 * width) * 3
    whole = activate(x.clone())
    for first, rows in ((0, 1), (22, 1), (3, 7), (1, 20)):
        assert torch.equal(activate(x[first : first + rows].clone()), whole[first : first + rows])


@threads
@pytest.mark.parametrize("width", [1, 4, 31, 576, 40000])
@pytest.mark.parametrize("name", ["sigmoid_", "exp_", "tanh_"])
def test_element_wise_by_rows(name: str, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(23, width) * 3
    whole = by_rows(x, getattr(torch, name))
    torch.testing.assert_close(whole, getattr(torch, name)(x.clone()))
    for first, rows in ((0, 1), (22, 1), (3, 7), (1, 20)):
        assert torch.equal(by_rows(x[first : first + rows].clone(), getattr(torch, name)), whole[first : first + rows])


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

"""Every operator against its fp32 reference, at odd sizes."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.config.decoder import RopeScaling
from headrace.ops.activation import eager as activation
from headrace.ops.activation import reference as activation_reference
from headrace.ops.linear import packed
from headrace.ops.linear import reference as linear_reference
from headrace.ops.linear.plain import PlainLinear, TiledLinear
from headrace.ops.norm import eager as norm
from headrace.ops.norm import reference as norm_reference
from headrace.ops.rope import eager as rope
from headrace.ops.rope import reference as rope_reference
from headrace.ops.rope.frequencies import inverse_frequencies

ROWS = (1, 2, 7, 33)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", list(BOUND))


def near(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.dtype == want.dtype
    assert torch.isfinite(got).all()
    assert (got.float() - want.float()).abs().max() <= bound * max(1.0, float(want.float().abs().max()))


@dtypes
@pytest.mark.parametrize("width", [1, 5, 64, 577])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
        near(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5), BOUND[dtype])
        if dtype == torch.float32:
            for size in (1.0, 1e-4, 1e6):
                want = norm_reference.rms_norm(x * size, weight, 1e-5)
                near(norm.ShortRmsNorm(weight, 1e-5)(x * size), want, 2 * BOUND[dtype])
        heads = torch.randn(rows, 9, width).to(dtype)[:, 1:6]
        per_head = torch.randn(5, width).to(dtype)
        want = norm_reference.rms_norm(heads, per_head, 1e-6)
        near(norm.head_rms_norm(heads, per_head, 1e-6), want, BOUND[dtype])


@dtypes
@pytest.mark.parametrize("dim", [2, 6, 64, 130])
def test_rotation(dim: int, dtype: torch.dtype) -> None:
    frequencies, factor = inverse_frequencies(500.0, dim, RopeScaling())
    table = rope.RopeTable(frequencies, factor, dtype, torch.device("cpu"))
    for rows in ROWS:
        positions = torch.randint(0, 5000, (rows,))
        x = torch.randn(rows, 7, dim).to(dtype)
        kept = x.clone()
        cos, signed_sin = table.rows(positions, 5000)
        want = rope_reference.rotate(x, positions, frequencies, factor)
        near(
            rope.rotate(x[:, 1:6], cos, signed_sin), want[:, 1:6], 10 * BOUND[dtype] if dtype == torch.float32 else 2e-2
        )
        assert torch.equal(x, kept), "the input is not overwritten"


def test_rope_rows_do_not_depend_on_growth() -> None:
    frequencies, factor = inverse_frequencies(10000.0, 64, RopeScaling())
    grown = rope.RopeTable(frequencies, factor, torch.float32, torch.device("cpu"))
    for length in (1, 2048, 2049, 9000):
        grown.rows(torch.tensor([length - 1]), length)
    fresh = rope.RopeTable(frequencies, factor, torch.float32, torch.device("cpu"))
    positions = torch.randint(0, 9000, (100,))
    for left, right in zip(grown.rows(positions, 9000), fresh.rows(positions, 9000), strict=True):
        assert torch.equal(left, right)


@dtypes
@pytest.mark.parametrize("width", [1, 31, 1536])
@pytest.mark.parametrize("function", [activation.silu_mul, activation.silu_mul_invariant])
def test_gated_activation(function: object, width: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x = (torch.randn(rows, 2 * width) * 4).to(dtype)
        want = activation_reference.silu_mul(x)
        near(function(x.clone()), want, BOUND[dtype])  # type: ignore[operator]


@dtypes
@pytest.mark.parametrize("kind", ["plain", "tiled", "packed", "packed_invariant"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 48), (5, 1000), (960, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(kind: str, shape: tuple[int, int], biased: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(shape) / math.sqrt(shape[1])).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    make = {
        "plain": lambda: PlainLinear(weight, bias),
        "tiled": lambda: TiledLinear(weight, bias),
        "packed": lambda: packed.PackedLinear(weight, bias),
        "packed_invariant": lambda: packed.PackedLinear(weight, bias, invariant=True),
    }[kind]
    if kind.startswith("packed") and not packed.is_available(dtype):
        pytest.skip(f"no packed kernels for {dtype} on this CPU")
    kernel = make()
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        near(kernel(x), linear_reference.linear(x, weight, bias), 5 * BOUND[dtype])


def test_linear_of_a_slice() -> None:
    """A kernel must honour strides: the input may be a part of a wider tensor."""
    weight = torch.randn(20, 30)
    wide = torch.full((6, 90), math.nan)
    wide[:, 30:60] = torch.randn(6, 30)
    want = linear_reference.linear(wide[:, 30:60].contiguous(), weight)
    for kernel in (PlainLinear(weight, None), TiledLinear(weight, None), packed.PackedLinear(weight, None)):
        near(kernel(wide[:, 30:60]), want, 1e-5)


SCALINGS = [
    RopeScaling(),
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
    RopeScaling("llama3", 32.0, 1024, 1.0, 4.0),
    RopeScaling("yarn", 4.0, 32768),
    RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=0.7),
    RopeScaling("yarn", 2.0, 128, beta_fast=4.0, beta_slow=2.0, attention_factor=1.25, truncate=False),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s.kind}-{s.factor}")
def test_frequencies_match_transformers(scaling: RopeScaling) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, dim = 20000.0, 64
    parameters = {"rope_type": "default" if scaling.kind == "none" else scaling.kind, "rope_theta": theta}
    if scaling.kind != "none":
        parameters["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = scaling.original_max_len
    if scaling.kind == "llama3":
        parameters.update(low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor)
    if scaling.kind == "yarn":
        fields = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
        parameters.update({name: getattr(scaling, name) for name in fields if getattr(scaling, name) is not None})
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=int(max(scaling.original_max_len, 1024) * scaling.factor),
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = inverse_frequencies(theta, dim, scaling)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_gelu_mul() -> None:
    x = torch.randn(7, 2 * 33) * 3
    want = activation_reference.gelu_mul(x)
    torch.testing.assert_close(activation.gelu_mul(x), want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(activation.gelu_mul_invariant(x), want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(want, torch.nn.functional.gelu(x[:, :33], approximate="tanh") * x[:, 33:])


def test_rotation_of_the_front_of_a_head() -> None:
    positions = torch.tensor([0, 5, 900])
    frequencies, factor = inverse_frequencies(10000.0, 8, RopeScaling())
    cos, sin = rope.RopeTable(frequencies, factor, torch.float32, torch.device("cpu")).rows(positions, 901)
    x = torch.randn(3, 2, 20)
    got = rope.rotate(x, cos, sin)
    torch.testing.assert_close(got[..., :8], rope_reference.rotate(x[..., :8], positions, frequencies))
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_unit_norm() -> None:
    x = torch.randn(5, 3, 24)
    torch.testing.assert_close(norm.unit_rms_norm(x, 1e-5), norm_reference.rms_norm(x, torch.ones(24), 1e-5))

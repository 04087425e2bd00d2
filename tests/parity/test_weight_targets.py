"""The names, shapes and parts that our models ask a checkpoint for."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import CASES, CPU, checkpoint, decoder_of, load, reference

from headrace.base.errors import ConfigError, InvariantError, UnsupportedModelError, WeightLoadError
from headrace.config.decoder import ARCHITECTURES
from headrace.models.registry import MODULES, CausalModel, ModelContext, build_model, model_class
from headrace.parallel.groups import TensorParallel


def build(case: str, tp: TensorParallel | None = None, **changes: object) -> CausalModel:
    fields = {"dtype": torch.float32, "quantization": "none", "invariant": False, **changes}
    context = ModelContext(
        fields["dtype"],  # type: ignore[arg-type]
        CPU,
        tp or TensorParallel(),
        fields["quantization"],  # type: ignore[arg-type]
        bool(fields["invariant"]),
    )
    return build_model(decoder_of(reference(case)), context)


@pytest.mark.parametrize("case", CASES)
def test_targets_are_exactly_the_checkpoint(case: str) -> None:
    oracle = reference(case)
    model = build(case)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint(oracle).items()}
    if model.decoder.tie_embeddings:
        assert shapes.pop("lm_head.weight") == shapes["model.embed_tokens.weight"]
        assert "lm_head.weight" in model.ignorable_weights
    else:
        assert "lm_head.weight" not in model.ignorable_weights
    assert {name: target.shape for name, target in model.weight_targets().items()} == shapes


@pytest.mark.parametrize("case", ["llama", "qwen3_tied_biased", "gemma3", "llama4", "qwen3_next"])
def test_every_target_matters(case: str) -> None:
    """Poison one tensor: some parameter must hold the poison, so no loader drops its tensor."""
    names = list(build(case).weight_targets())
    for poisoned in names:
        model = build(case)
        for name, target in model.weight_targets().items():
            target.load(torch.full(target.shape, math.nan if name == poisoned else 0.0))
        held = [value for value in parameters(model) if value.isnan().any()]
        want = math.prod(model.weight_targets()[poisoned].shape)
        heads = model.decoder.num_heads if "q_norm" in poisoned else 1
        heads = model.decoder.num_kv_heads if "k_norm" in poisoned else heads
        assert sum(int(value.isnan().sum()) for value in held) == want * heads, poisoned


def parameters(part: object, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Return every float tensor that a model holds, once each: parts are plain objects, lists and dictionaries."""
    seen = set() if seen is None else seen
    if id(part) in seen:
        return []
    seen.add(id(part))
    if isinstance(part, torch.Tensor):
        return [part] if part.is_floating_point() else []
    if isinstance(part, list | tuple):
        inner: list[object] = list(part)
    elif isinstance(part, dict):
        inner = list(part.values())
    elif type(part).__module__.startswith(("headrace.layers", "headrace.models")):
        inner = list(vars(part).values())
    else:
        inner = []
    return [value for item in inner for value in parameters(item, seen)]


def test_loaders_cast_and_do_not_keep_the_tensor() -> None:
    model = build("llama", dtype=torch.bfloat16)
    target = model.weight_targets()["model.layers.1.mlp.gate_proj.weight"]
    source = torch.randn(target.shape, dtype=torch.float16)
    target.load(source)
    want = source.to(torch.bfloat16)
    source.zero_()
    weight = model._layers[1].mlp.gate_up.weight
    assert weight is not None
    assert torch.equal(weight[: want.shape[0]], want)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_finalize_frees_and_forbids(quantization: str) -> None:
    model = build("llama", quantization=quantization)
    before = model.parameter_bytes()
    load(model, reference("llama").state_dict())
    after = model.parameter_bytes()
    assert after == before if quantization == "none" else after < 0.6 * before
    assert all(layer.mlp.gate_up.weight is None for layer in model._layers)
    with pytest.raises(WeightLoadError, match="packed already"):
        model.weight_targets()
    model.finalize()
    assert model.parameter_bytes() == after


def test_use_before_finalize_is_refused() -> None:
    model = build("llama")
    with pytest.raises(InvariantError, match="before finalize"):
        model.logits(torch.zeros(1, 64))
    with pytest.raises(InvariantError, match="before finalize"):
        model._layers[0].mlp(torch.zeros(1, 64))


def test_registry_has_every_architecture() -> None:
    assert set(MODULES) == set(ARCHITECTURES)
    for name in ARCHITECTURES:
        assert model_class(name).__name__ == name
    with pytest.raises(UnsupportedModelError, match="BertModel"):
        model_class("BertModel")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "int8", "dtype": torch.bfloat16}, "float32 activations"),
        ({"quantization": "int4"}, "unknown quantization"),
        ({"invariant": True, "dtype": torch.bfloat16}, "batch-invariant"),
        ({"invariant": True, "quantization": "int8"}, "batch-invariant"),
    ],
)
def test_contexts_that_cannot_be_served(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("llama", **changes)


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"attention heads 4 .* 3"):
        build("llama", TensorParallel(0, 3))
    with pytest.raises(ConfigError, match=r"2 KV heads .* 3"):
        build("qwen2_tied", TensorParallel(0, 3))
    with pytest.raises(ConfigError, match=r"attention heads 4 .* 8"):
        build("llama", TensorParallel(0, 8))

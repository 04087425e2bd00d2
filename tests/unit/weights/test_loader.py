from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import WeightLoadError
from headrace.config import ModelConfig
from headrace.weights.gguf_names import hf_name, restore_row_order, restore_values
from headrace.weights.loader import LoadReport, dummy_values, load_weights
from headrace.weights.source import ModelFiles, resolve_model
from headrace.weights.target import WeightTarget


class Sink:
    """Targets that keep what they are given, and how often."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.loads: dict[str, int] = dict.fromkeys(shapes, 0)
        self.targets = {name: WeightTarget(shape, self._taker(name)) for name, shape in shapes.items()}

    def _taker(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(tensor: torch.Tensor) -> None:
            self.values[name] = tensor.clone()
            self.loads[name] += 1

        return take


def resolved(path: Path, **options: Any) -> ModelFiles:
    return resolve_model(ModelConfig(model=str(path), **options))


TENSORS = {
    "model.norm.weight": torch.arange(4, dtype=torch.float32),
    "a.weight": torch.arange(8, dtype=torch.bfloat16).reshape(2, 4),
    "b.weight": torch.arange(6, dtype=torch.float16).reshape(3, 2),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_one_file_and_shards_fill_each_target_once(write_model: Callable[..., Path]) -> None:
    names = list(TENSORS)
    sharded = {
        "model-1.safetensors": {n: TENSORS[n] for n in names[:2]},
        "model-2.safetensors": {names[2]: TENSORS[names[2]]},
    }
    index = {"weight_map": {n: shard for shard, tensors in sharded.items() for n in tensors}}
    paths = [
        write_model({"model.safetensors": TENSORS}, "one"),
        write_model(sharded, "two", **{"model.safetensors.index": index}),
    ]
    for path in paths:
        sink = Sink(SHAPES)
        report = load_weights(resolved(path), sink.targets)
        assert report == LoadReport(3, 4 * 4 + 8 * 2 + 6 * 2, ())
        assert set(sink.loads.values()) == {1}
        for name, tensor in TENSORS.items():
            assert sink.values[name].dtype == tensor.dtype
            assert torch.equal(sink.values[name], tensor)


def test_missing_and_surplus_tensors_are_all_named(write_model: Callable[..., Path]) -> None:
    path = write_model({"model.safetensors": TENSORS})
    sink = Sink({**SHAPES, "c.weight": (1,), "d.weight": (1,)})
    del sink.targets["a.weight"]
    with pytest.raises(WeightLoadError, match=r"missing \(2\): c.weight, d.weight; not of this model \(1\): a.weight"):
        load_weights(resolved(path), sink.targets)


def test_ignorable_patterns_allow_surplus_but_not_missing(write_model: Callable[..., Path]) -> None:
    path = write_model({"model.safetensors": TENSORS})
    sink = Sink(SHAPES)
    del sink.targets["a.weight"]
    assert load_weights(resolved(path), sink.targets, ignorable=["?.weight"]).ignored == ("a.weight",)


def test_a_wrong_shape_names_tensor_and_both_shapes(write_model: Callable[..., Path]) -> None:
    path = write_model({"model.safetensors": TENSORS})
    sink = Sink({**SHAPES, "a.weight": (4, 2)})
    with pytest.raises(WeightLoadError, match=r"'a.weight' in model.safetensors has shape \[2, 4\].*\[4, 2\]"):
        load_weights(resolved(path), sink.targets)


def test_a_tensor_in_two_files_is_refused(write_model: Callable[..., Path]) -> None:
    path = write_model({"x.safetensors": TENSORS, "y.safetensors": {"a.weight": TENSORS["a.weight"]}})
    with pytest.raises(WeightLoadError, match=r"'a.weight' is stored twice: in x.safetensors and in y.safetensors"):
        load_weights(resolved(path), Sink(SHAPES).targets)


def test_integer_weights_are_refused(write_model: Callable[..., Path]) -> None:
    path = write_model({"model.safetensors": {"a.weight": torch.zeros(2, 2, dtype=torch.int8)}})
    with pytest.raises(WeightLoadError, match=r"'a.weight'.*int8"):
        load_weights(resolved(path), Sink({"a.weight": (2, 2)}).targets)


def test_every_truncation_of_safetensors_is_a_weight_load_error(write_model: Callable[..., Path]) -> None:
    path = write_model({"model.safetensors": TENSORS})
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 4, 8, 50, len(whole) - 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(WeightLoadError, match=r"model.safetensors: cannot be read.*truncated"):
            load_weights(resolved(path), Sink(SHAPES).targets)


def test_an_error_of_the_target_is_not_blamed_on_the_file(write_model: Callable[..., Path]) -> None:
    path = write_model({"model.safetensors": TENSORS})

    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("target")

    with pytest.raises(RuntimeError, match="target"):
        load_weights(resolved(path), {name: WeightTarget(shape, fail) for name, shape in SHAPES.items()})


def test_dummy_values_depend_on_seed_and_name_alone() -> None:
    big = (3, (1 << 20) + 5)
    for shape in ((64, 64), big):
        first = dummy_values("x.weight", shape, 1)
        assert first.shape == shape
        assert torch.equal(first, dummy_values("x.weight", shape, 1))
        assert not torch.equal(first, dummy_values("x.weight", shape, 2))
        assert not torch.equal(first, dummy_values("y.weight", shape, 1))
        assert abs(float(first.std()) - 0.02) < 0.002
        assert bool(torch.isfinite(first).all())
    assert abs(float(dummy_values("model.norm.weight", (4096,), 0).mean()) - 1.0) < 0.01


def test_dummy_loads_every_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    sink = Sink(SHAPES)
    report = load_weights(resolved(tmp_path, load_format="dummy"), sink.targets, seed=3)
    assert report.tensors == 3
    assert set(sink.loads.values()) == {1}


GGUF_KEYS = {
    "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 32, "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's conversion does: element i of the first half, element i of the second half, ..."""
    size = rows.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_names_and_row_order(write_gguf: Callable[..., Path], arch: str) -> None:
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((32, 32), dtype=np.float32), rng.standard_normal((16, 32), dtype=np.float32)
    bias = rng.standard_normal(32, dtype=np.float32)
    reorder = interleave if arch == "llama" else lambda rows, heads: rows
    tensors = {
        "blk.0.attn_q.weight": reorder(query, 4),
        "blk.0.attn_k.weight": reorder(key, 2),
        "blk.0.attn_q.bias": reorder(bias, 4),
        "blk.0.attn_v.weight": key,
        "rope_freqs.weight": np.ones(4, np.float32),
    }
    path = write_gguf(
        {key_.replace("llama.", f"{arch}."): value for key_, value in GGUF_KEYS.items()} | {f"{arch}.vocab_size": 8},
        tensors,
        arch=arch,
    )
    prefix = "model.layers.0.self_attn."
    sink = Sink(
        {
            f"{prefix}q_proj.weight": (32, 32),
            f"{prefix}k_proj.weight": (16, 32),
            f"{prefix}q_proj.bias": (32,),
            f"{prefix}v_proj.weight": (16, 32),
        }
    )
    load_weights(resolved(path), sink.targets)
    assert np.array_equal(sink.values[f"{prefix}q_proj.weight"].numpy(), query)
    assert np.array_equal(sink.values[f"{prefix}k_proj.weight"].numpy(), key)
    assert np.array_equal(sink.values[f"{prefix}q_proj.bias"].numpy(), bias)
    assert np.array_equal(sink.values[f"{prefix}v_proj.weight"].numpy(), key)


def test_an_unknown_gguf_tensor_is_named(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({**GGUF_KEYS, "llama.vocab_size": 8}, {"blk.0.strange.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(WeightLoadError, match=r"blk\.0\.strange\.weight"):
        load_weights(resolved(path), {})


def test_names_of_all_tensors_of_smollm(smollm_path: Path) -> None:
    from headrace.weights.gguf_file import GgufFile

    names = [hf_name(name, "llama") for name in GgufFile(smollm_path).tensors]
    assert None not in names
    assert len(set(names)) == 272
    assert {"model.layers.29.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"} <= set(names)


def test_other_projections_keep_their_order() -> None:
    tensor = torch.arange(12.0).reshape(6, 2)
    assert restore_row_order("model.layers.0.self_attn.v_proj.weight", tensor, 1, 1) is tensor


def test_names_of_four_norms() -> None:
    prefix = "model.layers.3."
    assert hf_name("blk.3.ffn_norm.weight", "llama") == prefix + "post_attention_layernorm.weight"
    assert hf_name("blk.3.ffn_norm.weight", "gemma3") == prefix + "pre_feedforward_layernorm.weight"
    assert hf_name("blk.3.post_attention_norm.weight", "gemma3") == prefix + "post_attention_layernorm.weight"
    assert hf_name("blk.3.post_ffw_norm.weight", "gemma3") == prefix + "post_feedforward_layernorm.weight"
    assert hf_name("blk.3.post_ffw_norm.weight", "llama") is None


def test_norms_of_gemma_become_distances_from_1() -> None:
    stored = torch.tensor([1.5, 0.25])
    name = "model.layers.0.self_attn.q_norm.weight"
    assert torch.equal(restore_values(name, stored, "gemma3", 1, 1), torch.tensor([0.5, -0.75]))
    assert restore_values(name, stored, "qwen3", 1, 1) is stored
    assert restore_values("model.embed_tokens.weight", stored, "gemma3", 1, 1) is stored

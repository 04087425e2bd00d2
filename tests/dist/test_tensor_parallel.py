"""A tiny random Llama on two ranks over gloo equals one rank: every log-probability of prompt and output."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from headrace.base.ids import RequestId, Slot, StepId
from headrace.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from headrace.engine.executors import make_executor
from headrace.kv.budget import fixed_layout
from headrace.types.plans import PlanRow, SlotStart, StepPlan
from headrace.types.sampling import SamplingParams

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 64, 128, 2, 4, 2, 16
TOLERANCE = 1e-4
STEPS = 12
PROMPTS = [[5, 17, 80, 3, 41, 9, 60], [33, 2]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape):
        return 0.2 * torch.randn(*shape, generator=generator)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = 1 + matrix(HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = 1 + matrix(HIDDEN)
        tensors[prefix + "post_attention_layernorm.weight"] = 1 + matrix(HIDDEN)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    save_file(tensors, folder / "model.safetensors")
    return folder


def run(model_dir, runtime_dir, ranks):
    """Two greedy requests, the longer prompt in two chunks; return facts and all results by request."""
    config = EngineConfig(
        model=ModelConfig(model=str(model_dir), dtype="float32"),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
        parallel=ParallelConfig(device="cpu", tensor_parallel_size=ranks, cpu_threads=1),
    )
    params = SamplingParams(temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB, max_tokens=STEPS)
    executor = make_executor(config, runtime_dir)
    try:
        facts = executor.start()
        executor.allocate(fixed_layout(facts.layer_caches, block_tokens=16, usable_blocks=8))
        starts = [
            SlotStart(
                Slot(slot),
                RequestId(f"r{slot}"),
                prompt,
                len(prompt),
                0,
                [[1 + 2 * slot, 2 + 2 * slot]],
                params,
                [],
                [],
            )
            for slot, prompt in enumerate(PROMPTS)
        ]
        chunks = [(0, 0, 4, False), (1, 0, 2, True)], [(0, 4, 3, True), (1, 2, 1, True)]
        results = {0: [], 1: []}
        for step in range(STEPS):
            rows = chunks[step] if step < 2 else [(0, 5 + step, 1, True), (1, 1 + step, 1, True)]
            plan_rows = [PlanRow(Slot(slot), RequestId(f"r{slot}"), start, n, s) for slot, start, n, s in rows]
            executor.submit(StepPlan(StepId(step), [], starts if step == 0 else [], [], plan_rows))
            for slot, row in enumerate(executor.collect().rows):
                assert row.error is None
                results[slot].append(row)
    finally:
        executor.close()
    return facts, results


def table(entry):
    return dict(zip(entry.top_ids, entry.top_logprobs, strict=True))


def worst(left, right):
    assert left.keys() == right.keys() == set(range(VOCAB))
    return max(abs(left[token] - right[token]) for token in left)


def test_two_ranks_equal_one(model_dir, tmp_path):
    before = torch.get_num_threads()
    try:
        facts, one = run(model_dir, tmp_path, 1)
        facts_two, two = run(model_dir, tmp_path, 2)
    finally:
        torch.set_num_threads(before)
    assert facts.layer_caches[0].spec.kv_heads == 2 * facts_two.layer_caches[0].spec.kv_heads
    assert facts_two.parameter_bytes < facts.parameter_bytes
    assert list(tmp_path.iterdir()) == []
    compared = 0
    for slot, prompt in enumerate(PROMPTS):
        prompts = [[entry for row in rows[slot] for entry in row.prompt_logprobs] for rows in (one, two)]
        assert len(prompts[0]) == len(prompts[1]) == len(prompt) - 1
        for left, right in zip(*prompts, strict=True):
            assert worst(table(left), table(right)) <= TOLERANCE
        for left, right in zip(one[slot], two[slot], strict=True):
            if not left.token_ids:
                assert not right.token_ids
                continue
            assert worst(table(left.logprobs[0]), table(right.logprobs[0])) <= TOLERANCE
            compared += 1
            if left.token_ids != right.token_ids:
                first, second = left.logprobs[0].top_logprobs[:2]
                assert first - second <= 2 * TOLERANCE
                break
    assert compared > STEPS

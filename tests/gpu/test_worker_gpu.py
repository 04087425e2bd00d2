"""The worker and the sampler on a GPU against the same on the CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headrace.base.ids import RequestId, Slot, StepId
from headrace.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.kv.budget import fixed_layout
from headrace.parallel.groups import TensorParallel
from headrace.types.plans import PlanRow, SlotStart, StepPlan
from headrace.types.sampling import SamplingParams
from headrace.weights.source import resolve_model
from headrace.worker.sampling.sampler import Sampler
from headrace.worker.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 5003
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


class NoHistory:
    def output_ids(self, slot):
        return np.array([7, 8, 9], np.int64)


def start(slot, params, prompt=(1, 2, 3), blocks=()):
    request_id = RequestId(f"r{slot}")
    return SlotStart(Slot(slot), request_id, list(prompt), len(prompt), 0, [list(blocks)], params, [0], [[8, 9, 4]])


def test_the_sampler_chooses_the_same_tokens_as_on_a_cpu():
    changes = [
        {"temperature": 0.0},
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 3.0},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 20, "top_p": 0.8},
        {"logit_bias": {5: 3.0}, "temperature": 0.5},
        {"allowed_token_ids": [4, 5, 6, 900], "min_tokens": 8, "stop_token_ids": [5]},
        {"logprobs": 5},
    ]
    params = [SamplingParams(seed=seed, **change) for seed in range(20) for change in changes]
    slots = np.arange(len(params))
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[11] = torch.nan
    answers = []
    with torch.inference_mode():
        for device in ("cpu", "cuda"):
            sampler = Sampler(len(params), VOCAB)
            for slot, each in enumerate(params):
                assert sampler.start(start(slot, each)) is None
            answers.append(sampler.sample(logits.to(device, copy=True), slots, np.full(len(slots), 3), NoHistory()))
    cpu, gpu = answers
    assert list(cpu.errors) == list(gpu.errors) == [11]
    # exp may differ in its last bit, so a number that falls on an edge may go to the neighbour.
    assert (cpu.token_ids != gpu.token_ids).sum() <= 1
    for row, entry in cpu.logprobs.items():
        other = gpu.logprobs[row]
        assert other.top_ids == entry.top_ids
        assert other.logprob == pytest.approx(entry.logprob, abs=1e-5)


def answers_on(device, folder, dtype):
    (folder / "config.json").write_text(json.dumps(TINY))
    config = EngineConfig(
        model=ModelConfig(model=str(folder), load_format="dummy", dtype=dtype),
        cache=CacheConfig(gpu_memory_utilization=0.5, kv_cache_memory_bytes=None),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256),
        parallel=ParallelConfig(device=device, cpu_threads=2),
    )
    worker = Worker(config, resolve_model(config.model), TensorParallel(0, 1))
    facts = worker.load()
    worker.allocate(fixed_layout(facts.layer_caches, block_tokens=16, usable_blocks=19))
    params = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=20)
    starts = [start(0, params, range(40), [1, 2, 3, 4]), start(1, params, range(90, 95), [5, 6])]
    entries, done = [], [0, 0]
    for step, tokens in enumerate([(17, 5), (23, 1), (1, 1), (1, 1), (1, 1)]):
        known = [40 + max(0, step - 1), 5 + step]
        rows = [
            PlanRow(Slot(s), RequestId(f"r{s}"), done[s], tokens[s], done[s] + tokens[s] == known[s]) for s in (0, 1)
        ]
        result = worker.execute(StepPlan(StepId(step), [], starts if step == 0 else [], [], rows))
        for slot in (0, 1):
            done[slot] += tokens[slot]
            entries += [*(result.rows[slot].prompt_logprobs or []), *(result.rows[slot].logprobs or [])]
    return facts, entries


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 5e-2)])
def test_the_worker_answers_as_on_a_cpu_and_sizes_its_cache(dtype, tolerance, tmp_path):
    _, cpu = answers_on("cpu", tmp_path, "float32")
    facts, gpu = answers_on("cuda", tmp_path, dtype)
    assert (facts.device, facts.dtype) == ("cuda:0", dtype)
    assert len(cpu) == len(gpu) == 39 + 4 + 4 + 5
    for left, right in zip(cpu, gpu, strict=True):
        if left.token_id != right.token_id:
            break
        assert right.logprob == pytest.approx(left.logprob, abs=tolerance)
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.3 * total < facts.cache_bytes < 0.5 * total

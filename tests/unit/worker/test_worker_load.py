"""The worker of one rank on a tiny real model: facts, rules of types, order of calls, one answer end to end."""

from __future__ import annotations

import json

import pytest
import torch

from headrace.base.errors import ConfigError, InvariantError, UnsupportedModelError
from headrace.base.ids import RequestId, Slot, StepId
from headrace.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.kv.budget import fixed_layout
from headrace.parallel.groups import TensorParallel
from headrace.types.cache_specs import KvLayout
from headrace.types.plans import PlanRow, SlotStart, StepPlan
from headrace.types.sampling import SamplingParams
from headrace.weights.source import resolve_model
from headrace.worker.worker import Worker

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def make_worker(folder, config_json=None, parallel=None, **model):
    (folder / "config.json").write_text(json.dumps({**TINY, **(config_json or {})}))
    config = EngineConfig(
        model=ModelConfig(model=str(folder), load_format="dummy", **model),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4),
        parallel=parallel or ParallelConfig(device="cpu", cpu_threads=1),
    )
    return Worker(config, resolve_model(config.model), TensorParallel(0, 1))


def layout_of(facts):
    caches = facts.layer_caches
    return fixed_layout(caches, block_tokens=16, usable_blocks=8)


def start(slot, prompt, blocks, params=None):
    sampling = params or SamplingParams(temperature=0.0, logprobs=3)
    return SlotStart(Slot(slot), RequestId(f"r{slot}"), prompt, len(prompt), 0, [blocks], sampling, [], [])


def row(slot, first, tokens, sample=True):
    return PlanRow(Slot(slot), RequestId(f"r{slot}"), first, tokens, sample)


def test_facts_of_a_float32_model(tmp_path):
    facts = make_worker(tmp_path, {"torch_dtype": "float32"}).load()
    assert (facts.vocab_tokens, facts.max_position, facts.cache_bytes) == (80, 128, 1 << 20)
    assert (facts.dtype, facts.device, facts.attention_backend) == ("float32", "cpu", "torch_exact")
    assert [cache.layer_index for cache in facts.layer_caches] == [0, 1]
    assert facts.layer_caches[0].spec.token_bytes() == 2 * 2 * 8 * 4
    assert facts.parameter_bytes > 80 * 32 * 4
    names = [phase.name for phase in facts.phases]
    assert names == ["look at the device", "build the model", "load weights", "prepare weights", "size the KV cache"]
    assert all(phase.seconds >= 0 for phase in facts.phases)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_half_checkpoints_run_in_bfloat16_on_a_cpu(stored, tmp_path):
    facts = make_worker(tmp_path, {"torch_dtype": stored}).load()
    assert (facts.dtype, facts.attention_backend) == ("bfloat16", "torch_sdpa")


def test_int8_has_float32_activations(tmp_path):
    facts = make_worker(tmp_path, {"torch_dtype": "bfloat16"}, quantization="int8").load()
    assert facts.dtype == "float32"


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_float16_is_refused_on_a_cpu_also_when_it_was_found(device, tmp_path):
    if device == "auto" and torch.cuda.is_available():
        pytest.skip("auto is a GPU here")
    worker = make_worker(tmp_path, dtype="float16", parallel=ParallelConfig(device=device))
    with pytest.raises(ConfigError, match="float16") as caught:
        worker.load()
    assert caught.value.param == "dtype"


def test_an_attention_backend_that_does_not_exist_is_refused(tmp_path):
    worker = make_worker(tmp_path, parallel=ParallelConfig(device="cpu", attention_backend="none_such"))
    with pytest.raises(ConfigError, match="none_such"):
        worker.load()


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="OtherForCausalLM"):
        make_worker(tmp_path, {"architectures": ["OtherForCausalLM"]}).load()


def test_the_order_of_calls_is_checked(tmp_path):
    worker = make_worker(tmp_path)
    with pytest.raises(InvariantError):
        worker.allocate(KvLayout([], 256, 0, 0))
    worker.load()
    with pytest.raises(InvariantError):
        worker.execute(StepPlan(StepId(0), [], [], [], []))


def test_one_request_answers_the_same_alone_chunked_and_in_company(tmp_path):
    """Bitwise in float32: tokens and log-probabilities."""
    prompt = [3, 50, 7, 7, 21, 60, 11]
    answers = []
    for company, chunks in ((0, [7]), (3, [7]), (2, [2, 4, 1])):
        worker = make_worker(tmp_path, {"torch_dtype": "float32"})
        worker.allocate(layout_of(worker.load()))
        starts, others, done, answer = [start(0, prompt, [1, 2])], list(range(1, 1 + company)), 0, []
        starts += [start(slot, [slot, 9, 9], [2 + slot]) for slot in others]
        for step in range(len(chunks) + 6):
            mine = chunks[step] if step < len(chunks) else 1
            rows = [row(slot, 0 if step == 0 else 2 + step, 3 if step == 0 else 1) for slot in others]
            rows.append(row(0, done, mine, done + mine >= len(prompt)))
            result = worker.execute(StepPlan(StepId(step), [], starts if step == 0 else [], [], rows))
            done += mine
            if result.rows[-1].token_ids:
                answer.append((result.rows[-1].token_ids, result.rows[-1].logprobs))
        answers.append(answer[:6])
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 6


def test_a_new_layout_replaces_the_old_one(tmp_path):
    worker = make_worker(tmp_path, {"torch_dtype": "float32"})
    facts = worker.load()
    answers = []
    for _ in range(2):
        worker.allocate(layout_of(facts))
        result = worker.execute(StepPlan(StepId(0), [], [start(0, [4, 5, 6], [3])], [], [row(0, 0, 3)]))
        answers.append(result.rows)
    assert answers[0] == answers[1]

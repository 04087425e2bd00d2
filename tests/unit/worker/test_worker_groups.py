"""The worker on models of several groups: windows, chunks and states in one arena, hits, checkpoints, preemption."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.attention.contract import Reach
from headrace.base.ids import RequestId, Slot, StepId
from headrace.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.parallel.groups import TensorParallel
from headrace.types.cache_specs import (
    FullAttentionSpec,
    GroupLayout,
    KvLayout,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.plans import BlockAppend, BlockCopy, PlanRow, SlotStart, StepPlan
from headrace.types.sampling import SamplingParams
from headrace.weights.source import resolve_model
from headrace.worker.profile import trial_layout
from headrace.worker.worker import Worker

COMMON = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
MODELS = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "hidden_act": "silu",
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "hidden_act": "silu",
    },
}
BLOCK = 4
PROMPT = [3, 50, 7, 7, 21, 60, 11, 2, 9, 14, 33, 5, 71, 8, 8, 40, 12, 66, 1, 25, 30]
GREEDY = SamplingParams(temperature=0.0, logprobs=3)


class Bench:
    """A worker, and blocks for its groups handed out one after the other."""

    def __init__(self, folder, name):
        (folder / "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
        config = EngineConfig(
            model=ModelConfig(model=str(folder), load_format="dummy"),
            cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
            scheduler=SchedulerConfig(max_num_seqs=4),
            parallel=ParallelConfig(device="cpu", cpu_threads=1),
        )
        self.worker = Worker(config, resolve_model(config.model), TensorParallel(0, 1))
        self.facts = self.worker.load()
        self.layout = layout_of(self.facts.layer_caches, 400)
        self.worker.allocate(self.layout)
        self.next = self.layout.null_granules
        self.step = 0

    def block(self, group):
        first = self.next
        self.next += self.layout.groups[group].block_granules
        assert self.next <= self.layout.null_granules + self.layout.extent_granules
        return first

    def tables(self, tokens):
        """Fresh tables for a row of a length."""
        return [
            [self.block(group.group) for _ in range(-(-tokens // BLOCK) if group.block_tokens else 1)]
            for group in self.layout.groups
        ]

    def run(self, rows=(), starts=(), appends=(), decodes=(), copies=(), saves=(), releases=()):
        self.step += 1
        plan_rows = [PlanRow(Slot(slot), RequestId(f"r{slot}"), *rest) for slot, *rest in rows]
        plan = StepPlan(StepId(self.step), list(releases), list(starts), list(appends), plan_rows, list(decodes),
                        list(copies), list(saves))  # fmt: skip
        return self.worker.execute(plan)

    def answer(self, slot, start_tokens, tables, chunks, count, copies=(), saves_after=None):
        """Run a request alone: chunks of its prompt, then one token at a time; return tokens and log-probabilities."""
        starts = [start(slot, tables, start_tokens)]
        done, found = start_tokens, []
        for index, tokens in enumerate(chunks):
            saves = saves_after if saves_after and index == 0 else ()
            rows = [(slot, done, tokens, done + tokens == len(PROMPT))]
            result = self.run(rows, starts if index == 0 else (), copies=copies if index == 0 else (), saves=saves)
            done += tokens
        assert done == len(PROMPT)
        for position in range(done, done + count):
            found.append((result.rows[0].token_ids, result.rows[0].logprobs))
            blocks = position // BLOCK
            appends = [
                [self.block(group.group)] if group.block_tokens and len(tables[group.group]) <= blocks else []
                for group in self.layout.groups
            ]
            for table, added in zip(tables, appends, strict=True):
                table += added
            result = self.run([(slot, position, 1, True)], appends=[BlockAppend(Slot(slot), appends)])
        return found


def layout_of(caches, blocks):
    members = {}
    for cache in caches:
        members.setdefault(cache.spec, []).append(cache)
    groups = []
    for index, (spec, layers) in enumerate(members.items()):
        tokens = 0 if isinstance(spec, RecurrentSpec) else BLOCK
        granules = -(-spec.block_bytes(tokens) * len(layers) // 512)
        groups.append(GroupLayout(index, spec, [cache.layer_index for cache in layers], tokens, blocks, granules))
    return KvLayout(groups, 512, blocks * max(group.block_granules for group in groups), 1)


def start(slot, tables, computed=0, prompt=PROMPT):
    tables = [list(table) for table in tables]
    return SlotStart(Slot(slot), RequestId(f"r{slot}"), prompt, len(prompt), computed, tables, GREEDY, [], [])


@pytest.mark.parametrize("name", MODELS)
def test_groups_and_facts(name, tmp_path):
    bench = Bench(tmp_path, name)
    kinds = {type(group.spec).__name__ for group in bench.layout.groups}
    assert (
        kinds
        == {
            "gemma3": {"FullAttentionSpec", "SlidingWindowSpec"},
            "llama4": {"FullAttentionSpec", "ChunkedLocalSpec"},
            "qwen3_next": {"FullAttentionSpec", "RecurrentSpec"},
        }[name]
    )
    assert bench.facts.attention_backend == "torch_exact"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_chunked_in_company_resumed_and_after_a_hit(name, tmp_path):
    bench = Bench(tmp_path, name)
    tables = bench.tables(len(PROMPT))
    want = bench.answer(0, 0, tables, [len(PROMPT)], 6)

    # Preempted, its blocks given to nobody yet, and begun again in another slot with other chunks. After 12 tokens
    # its state is saved: in the same step, behind the computation.
    states = [group.group for group in bench.layout.groups if not group.block_tokens]
    saved = {group: bench.block(group) for group in states}
    again = bench.tables(len(PROMPT))
    bench.run(releases=[Slot(0)])
    got = bench.answer(2, 0, again, [12, 5, 4], 6, saves_after=[BlockCopy(g, again[g][0], saved[g]) for g in states])
    assert got == want

    # A hit of 12 tokens: whole blocks shared, nothing where a window or chunk does not reach, the checkpoint copied.
    hit = bench.tables(len(PROMPT))
    for group in bench.layout.groups:
        if group.block_tokens:
            hit[group.group][:3] = again[group.group][:3]
            first = int(Reach.of(group.spec).first(np.array([12]))[0])
            hit[group.group][: first // BLOCK] = [0] * (first // BLOCK)
    copies = [BlockCopy(group, saved[group], hit[group][0]) for group in states]
    assert bench.answer(1, 12, hit, [8, 1], 6, copies=copies) == want

    # A hit of 14 tokens with a partial tail: the first half of block 3 is right, and is copied.
    if not states:
        tail = bench.tables(len(PROMPT))
        copies = []
        for group in range(len(tail)):
            tail[group][:3] = hit[group][:3]
            copies.append(BlockCopy(group, again[group][3], tail[group][3]))
        assert bench.answer(3, 14, tail, [7], 6, copies=copies) == want


@pytest.mark.parametrize("name", MODELS)
def test_a_state_starts_at_zero_in_a_block_that_held_another(name, tmp_path):
    bench = Bench(tmp_path, name)
    tables = bench.tables(len(PROMPT))
    want = bench.answer(0, 0, [list(table) for table in tables], [len(PROMPT)], 2)
    bench.run(releases=[Slot(0)])
    assert bench.answer(0, 0, [list(table) for table in tables], [len(PROMPT)], 2) == want


@pytest.mark.parametrize("name", MODELS)
def test_decodes_of_several_slots_beside_a_prompt(name, tmp_path):
    """Columns and rows in one step read the right tables of every group."""
    bench = Bench(tmp_path, name)
    alone = bench.answer(0, 0, bench.tables(len(PROMPT)), [len(PROMPT)], 4)
    want = [tokens[0] for tokens, _ in alone]
    bench.run(releases=[Slot(0)])
    first, second = bench.tables(28), bench.tables(28)
    bench.run([(0, 0, len(PROMPT), True)], [start(0, first)])
    result = bench.run([(3, 0, len(PROMPT), True)], [start(3, second)], decodes=[Slot(0)])
    assert (result.decode_tokens, result.rows[0].token_ids) == ([want[1]], [want[0]])
    result = bench.run(decodes=[Slot(3), Slot(0)])
    assert result.decode_tokens == [want[1], want[2]]
    assert bench.run(decodes=[Slot(0), Slot(3)]).decode_tokens == [want[3], want[2]]


def test_the_trial_layout_holds_one_sequence_of_every_group():
    full, window = FullAttentionSpec(2, 16, 16, 2), SlidingWindowSpec(1, 8, 8, 2, 100)
    state = RecurrentSpec((StatePart("state", (3, 1000), 4),))
    caches = [
        LayerCache(3, full),
        LayerCache(0, window),
        LayerCache(1, state, "ssm"),
        LayerCache(2, full),
        LayerCache(4, SharedSpec(0)),
        LayerCache(5, NoCacheSpec()),
    ]
    layout, tables = trial_layout(caches, 16, 100)
    assert [group.spec for group in layout.groups] == [window, state, full]
    assert [group.layer_indices for group in layout.groups] == [[0], [1], [2, 3]]
    assert layout.groups[1].parts == ["ssm"]
    assert layout.shared_layers == [(4, 0)]
    assert [len(table) for table in tables] == [7, 1, 7]
    used = set(range(layout.null_granules))
    for group, table in zip(layout.groups, tables, strict=True):
        assert group.block_granules * layout.granule_bytes >= group.block_bytes()
        for block in table:
            own = set(range(block, block + group.block_granules))
            assert not used & own
            used |= own
    assert len(used) * layout.granule_bytes == layout.total_bytes()

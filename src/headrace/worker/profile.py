"""Binds KV memory to a model, and tries a largest step on a GPU to learn what activations need.

Must not be used on a CPU for measuring: there the KV cache is a share of free memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headrace.attention.arena import KvArena
from headrace.attention.contract import RowBatch
from headrace.attention.select import KeyValueSpec, Selection
from headrace.attention.step import StepContext
from headrace.config.engine import EngineConfig
from headrace.models.registry import CausalModel
from headrace.types.cache_specs import (
    CacheSpec,
    GroupLayout,
    KvLayout,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
)
from headrace.worker.memory import GpuUse, gpu_cache_bytes

_TRIAL_GRANULE_BYTES = 4096


def bind_layout(
    model: CausalModel, layout: KvLayout, backends: Mapping[KeyValueSpec, Selection], device: torch.device
) -> KvArena:
    """Make the KV memory of a layout and give it to the model.

    Args:
        model: whose layers take their parts.
        layout: of this rank.
        backends: the choice for each attention spec of the model.
        device: of the memory.

    Mutates:
        The model's cache; an earlier one is dropped.
    """
    names = {
        group.group: backends[group.spec].backend for group in layout.groups if isinstance(group.spec, KeyValueSpec)
    }
    arena = KvArena(layout, model.cache_dtype, device, names)
    model.bind_cache(arena)
    return arena


def profiled_cache_bytes(
    config: EngineConfig, model: CausalModel, backends: Mapping[KeyValueSpec, Selection], device: torch.device
) -> int:
    """Return the KV bytes of a rank on a GPU, after one step of the largest size on a throw-away cache.

    Every rank must call it: the step runs collectives.

    Raises:
        InsufficientMemoryError: nothing is left for the cache.
    """
    tokens, slots = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    caches, block_tokens = model.layer_caches(), config.cache.block_size
    layout, tables = trial_layout(caches, block_tokens, tokens)
    bind_layout(model, layout, backends, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    step = StepContext(torch.arange(tokens, device=device), [RowBatch.of([0], [tokens], [table]) for table in tables])
    hidden = model.forward(ids, step)
    # Greedy sampling needs little beside the logits; drawing needs a few copies of them.
    logits = model.logits(hidden[: min(slots, tokens)])
    peak = torch.cuda.max_memory_allocated(device) - before + 3 * logits.numel() * logits.element_size()
    del hidden, logits, step, ids
    # The trial's cache goes before the rest is counted.
    bind_layout(model, trial_layout(caches, block_tokens, 1)[0], backends, device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return gpu_cache_bytes(config.cache, GpuUse(total, total - free, peak))


def trial_layout(caches: Sequence[LayerCache], block_tokens: int, tokens: int) -> tuple[KvLayout, list[list[int]]]:
    """Return a layout that holds one sequence, and the block table of each of its groups.

    Args:
        caches: what the model declares.
        block_tokens: of every group that has tokens.
        tokens: length of the sequence.
    """
    members: dict[CacheSpec, list[LayerCache]] = {}
    shared: list[tuple[int, int]] = []
    for cache in sorted(caches, key=lambda cache: cache.layer_index):
        if isinstance(cache.spec, SharedSpec):
            shared.append((cache.layer_index, cache.spec.source_layer))
        elif not isinstance(cache.spec, NoCacheSpec):
            members.setdefault(cache.spec, []).append(cache)
    groups, counts = [], []
    for index, (spec, layers) in enumerate(members.items()):
        of_block = 0 if isinstance(spec, RecurrentSpec) else block_tokens
        count = -(-tokens // of_block) if of_block else 1
        block_bytes = spec.block_bytes(of_block) * len(layers)
        indices, parts = [layer.layer_index for layer in layers], [layer.part for layer in layers]
        granules = -(-block_bytes // _TRIAL_GRANULE_BYTES)
        groups.append(GroupLayout(index, spec, indices, of_block, count + 1, granules, parts))
        counts.append(count)
    first, tables = max((group.block_granules for group in groups), default=0), []
    end = first
    for group, count in zip(groups, counts, strict=True):
        tables.append([end + i * group.block_granules for i in range(count)])
        end += count * group.block_granules
    return KvLayout(groups, _TRIAL_GRANULE_BYTES, end - first, 1, shared), tables

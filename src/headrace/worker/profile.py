"""Binds KV memory to a model, and tries a largest step on a GPU to learn what activations need.

Must not be used on a CPU for measuring: there the KV cache is a share of free memory.
"""

from __future__ import annotations

import torch

from headrace.attention.contract import AttentionBackend, LayerKv, RowBatch
from headrace.config.engine import EngineConfig
from headrace.models.registry import CausalModel
from headrace.types.cache_specs import GroupLayout, KvLayout
from headrace.worker.memory import GpuUse, gpu_cache_bytes


def bind_layout(
    model: CausalModel, backend: AttentionBackend, layout: KvLayout, dtype: torch.dtype, device: torch.device
) -> None:
    """Make the KV memory of a layout and give it to the model.

    Mutates:
        The model's and the backend's cache; an earlier one is dropped.
    """
    backend.release()
    memory: dict[int, LayerKv] = {}
    for group in layout.groups:
        memory.update(backend.allocate(group, dtype, device))
    model.bind_cache(memory)


def profiled_cache_bytes(
    config: EngineConfig, model: CausalModel, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the KV bytes of a rank on a GPU, after one step of the largest size on a throw-away cache.

    Every rank must call it: the step runs collectives.

    Raises:
        InsufficientMemoryError: nothing is left for the cache.
    """
    tokens, slots = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    block_tokens = config.cache.block_size
    blocks = -(-tokens // block_tokens) + 1
    bind_layout(model, backend, _one_group(model, block_tokens, blocks), dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device)
    step = backend.prepare(RowBatch([0], [tokens], [list(range(1, blocks))]))
    hidden = model.forward(ids, positions, step)
    # Greedy sampling needs little beside the logits; drawing needs a few copies of them.
    logits = model.logits(hidden[: min(slots, tokens)])
    peak = torch.cuda.max_memory_allocated(device) - before + 3 * logits.numel() * logits.element_size()
    del hidden, logits, step, ids, positions
    # The trial's cache goes before the rest is counted.
    bind_layout(model, backend, _one_group(model, block_tokens, 1), dtype, device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return gpu_cache_bytes(config.cache, GpuUse(total, total - free, peak))


def _one_group(model: CausalModel, block_tokens: int, blocks: int) -> KvLayout:
    caches = model.layer_caches()
    indices = [cache.layer_index for cache in caches]
    return KvLayout([GroupLayout(0, caches[0].spec, indices, block_tokens, blocks)])

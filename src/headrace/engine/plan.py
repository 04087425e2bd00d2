"""What a model takes on a device: weights, KV cache, activations, logits, and how many requests run at once.

It lives on this floor because it needs the model's configuration (`config.decoder`, `weights.source`), the KV layout
(`kv.budget`) and the device table (`platforms.devices`); nothing below may see all four. Must not import torch, read
weights, or look at a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.base.errors import InsufficientMemoryError
from headrace.config import EngineConfig, ModelConfig
from headrace.config.decoder import DecoderConfig
from headrace.engine.model_bytes import (
    Formats,
    WeightBytes,
    activation_bytes,
    choose_formats,
    divides,
    idle_bytes,
    layer_caches,
    logits_bytes,
    parameter_count,
    weight_bytes,
)
from headrace.engine.plan_attention import AttentionChoice, attention_choices
from headrace.engine.plan_memory import Concurrency, GroupShare, concurrency, group_shares, request_bytes, token_bytes
from headrace.kv.budget import capacity_tokens, make_layout
from headrace.platforms.devices import DEVICES, DeviceRecord
from headrace.types.cache_specs import KvLayout, LayerCache
from headrace.weights.source import DEFAULT_MODEL, ModelFiles, resolve_model
from headrace.worker.memory import GpuUse, cpu_cache_bytes, gpu_cache_bytes


class Advice(msgspec.Struct, frozen=True):
    """One flag to change: as it stands on the command line, and why."""

    flag: str
    why: str


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one model on one device; all bytes are of one rank.

    Attributes:
        model: MODEL as given.
        architecture: of the model.
        parameters: of the whole model; tied embeddings count once.
        device: name in the table.
        tensor_parallel_size: ranks.
        dtype: of the activations.
        cache_dtype: of the KV cache.
        weight_format: "bfloat16", "float32", "float16" or "int8" (linears).
        memory_bytes: of the device.
        usable_bytes: what Headrace may take of it.
        reserved_bytes: driver, context, libraries.
        weights: parameters.
        activation_bytes: largest step (estimate).
        logits_bytes: logits of ``--max-num-seqs`` rows and three copies for drawing, in float32.
        kv_bytes: the KV cache.
        kv_token_bytes: KV of each further token of a long request, in all layers that keep every token.
        granule_bytes: unit of the KV memory.
        extent_bytes: unit that groups lend each other; with one group all of it.
        groups: what each group takes of a request of ``max_model_len`` tokens.
        block_tokens: ``--block-size``.
        kv_tokens: longest request that the KV cache holds alone, in tokens.
        model_max_len: longest request that the model was made for, in tokens.
        max_model_len: longest request that the engine would take: ``--max-model-len``, or else the model's length or
            what the KV cache holds.
        free_bytes: of the device after all of the above; negative: missing.
        fits: True if the engine would start, and run a request of ``max_model_len`` tokens.
        concurrency: requests at once by length.
        max_num_seqs: ``--max-num-seqs``, which limits concurrency too.
        decode_ms_floor: no decode step of one request is faster: weights read once at the data sheet's bandwidth.
        prefill_tokens_per_s_ceiling: no more prompt tokens a second: matrix products at the data sheet's rate.
        advice: flags to change, the most useful first.
        attention: backend of each group of layers, and why.
    """

    model: str
    architecture: str
    parameters: int
    device: str
    tensor_parallel_size: int
    dtype: str
    cache_dtype: str
    weight_format: str
    memory_bytes: int
    usable_bytes: int
    reserved_bytes: int
    weights: WeightBytes
    activation_bytes: int
    logits_bytes: int
    kv_bytes: int
    kv_token_bytes: int
    granule_bytes: int
    extent_bytes: int
    groups: list[GroupShare]
    block_tokens: int
    kv_tokens: int
    model_max_len: int
    max_model_len: int
    free_bytes: int
    fits: bool
    concurrency: list[Concurrency]
    max_num_seqs: int
    decode_ms_floor: float
    prefill_tokens_per_s_ceiling: float
    advice: list[Advice]
    attention: list[AttentionChoice] = []


def plan_files(config: ModelConfig) -> ModelFiles:
    """Find the configuration of a model without needing its weights.

    Args:
        config: MODEL may be a directory, a .gguf file, a bare config.json, a hub name, or "default".

    Raises:
        ModelSourceError: not found or not readable.
        ConfigError: the default model is not installed.
    """
    path = Path(config.model).expanduser()
    gguf = config.model == DEFAULT_MODEL or config.model.endswith(".gguf")
    if gguf or (path.is_dir() and not (path / "config.json").is_file()):
        return resolve_model(dataclasses.replace(config, load_format="auto"))
    return resolve_model(dataclasses.replace(config, load_format="dummy"))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Everything but the KV cache, on one rank."""

    usable: int
    reserved: int
    weights: WeightBytes
    activations: int
    logits: int

    @property
    def rest(self) -> int:
        """Bytes left for the KV cache; may be negative."""
        return self.usable - self.reserved - self.weights.total - self.activations - self.logits


def _sizes(
    decoder: DecoderConfig, formats: Formats, device: DeviceRecord, memory_bytes: int, config: EngineConfig, ranks: int
) -> _Sizes:
    cpu = device.kind == "cpu"
    usable = memory_bytes if cpu else int(memory_bytes * config.cache.gpu_memory_utilization)
    return _Sizes(
        usable=usable // ranks if cpu else usable,
        reserved=device.reserved_bytes,
        weights=weight_bytes(decoder, formats, ranks),
        activations=activation_bytes(decoder, formats, ranks, config.scheduler.max_num_batched_tokens),
        logits=logits_bytes(decoder, min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)),
    )


def _cache_bytes(sizes: _Sizes, device: DeviceRecord, memory_bytes: int, config: EngineConfig, ranks: int) -> int:
    """Return the bytes that a worker would give the KV cache of one rank, by the worker's own rules."""
    if device.kind == "cpu":
        return cpu_cache_bytes(config.cache, max(0, memory_bytes - ranks * sizes.weights.total), ranks)
    use = GpuUse(memory_bytes, sizes.reserved + sizes.weights.total, sizes.activations + sizes.logits)
    try:
        return gpu_cache_bytes(config.cache, use)
    except InsufficientMemoryError:
        return 0


def make_plan(
    name: str,
    decoder: DecoderConfig,
    device: DeviceRecord,
    memory_bytes: int,
    config: EngineConfig,
    *,
    quantized: bool = False,
) -> MemoryPlan:
    """Size a model on a device.

    Args:
        name: MODEL as given.
        decoder: dimensions of the model.
        device: its record.
        memory_bytes: memory of one device (of the whole machine for a CPU).
        config: options of the engine; ``parallel.tensor_parallel_size`` devices are assumed.
        quantized: True if the checkpoint is a quantised GGUF.

    Returns:
        The plan; ``fits`` says whether it works, ``advice`` what to change.

    Raises:
        UnsupportedModelError: the heads cannot be divided by the ranks.
    """
    ranks = config.parallel.tensor_parallel_size
    formats = choose_formats(decoder, device, config.model, quantized=quantized)
    sizes = _sizes(decoder, formats, device, memory_bytes, config, ranks)
    wanted_len = config.model.max_model_len or decoder.max_position
    caches = layer_caches(decoder, formats, ranks)
    layout = _layout(caches, config, _cache_bytes(sizes, device, memory_bytes, config, ranks), wanted_len)
    steps = _steps(config)
    shape = layout if layout is not None else _smallest(caches, config, wanted_len)
    kv_bytes = layout.total_bytes() if layout is not None else 0
    kv_tokens = capacity_tokens(layout, batch_tokens=steps[0], in_flight=steps[1]) if layout is not None else 0
    # Without the flag the engine serves what the cache holds; a length that was asked for must fit.
    max_len = wanted_len if config.model.max_model_len or not kv_tokens else min(wanted_len, kv_tokens)
    fits = sizes.rest >= kv_bytes and kv_tokens >= max_len
    plan = MemoryPlan(
        model=name,
        architecture=decoder.architecture,
        parameters=parameter_count(decoder),
        device=device.name,
        tensor_parallel_size=ranks,
        dtype=formats.dtype,
        cache_dtype=formats.cache_dtype,
        weight_format=formats.weight_format,
        memory_bytes=memory_bytes,
        usable_bytes=sizes.usable,
        reserved_bytes=sizes.reserved,
        weights=sizes.weights,
        activation_bytes=sizes.activations,
        logits_bytes=sizes.logits,
        kv_bytes=kv_bytes,
        kv_token_bytes=token_bytes(shape),
        granule_bytes=shape.granule_bytes,
        extent_bytes=shape.extent_granules * shape.granule_bytes,
        groups=group_shares(shape, max_len, *steps),
        block_tokens=config.cache.block_size,
        kv_tokens=kv_tokens,
        model_max_len=decoder.max_position,
        max_model_len=max_len,
        free_bytes=memory_bytes - (sizes.usable - sizes.rest) - kv_bytes,
        fits=fits,
        concurrency=concurrency(shape, max_len, *steps) if layout is not None else [Concurrency(max_len, 0)],
        max_num_seqs=config.scheduler.max_num_seqs,
        decode_ms_floor=_read_bytes(sizes.weights, idle_bytes(decoder, formats, ranks))
        / device.bandwidth_bytes_per_s
        * 1e3,
        prefill_tokens_per_s_ceiling=_prefill_ceiling(decoder, device, ranks),
        advice=[],
        attention=attention_choices(
            decoder,
            caches,
            formats,
            device="cpu" if device.kind == "cpu" else "cuda",
            ranks=ranks,
            wanted=config.parallel.attention_backend,
        ),
    )
    return msgspec.structs.replace(plan, advice=_advice(plan, decoder, device, config, quantized))


def _layout(caches: list[LayerCache], config: EngineConfig, cache_bytes: int, max_len: int) -> KvLayout | None:
    """Return the engine's own layout, or None if not even one block fits."""
    try:
        return make_layout(
            caches,
            block_tokens=config.cache.block_size,
            bytes_available=cache_bytes,
            num_blocks_override=config.cache.num_blocks_override,
            max_model_len=max_len,
        )
    except InsufficientMemoryError:
        return None


def _steps(config: EngineConfig) -> tuple[int, int]:
    """Return the most tokens of a step, and the plans in flight."""
    return config.scheduler.max_num_batched_tokens, config.scheduler.steps_in_flight


def _smallest(caches: list[LayerCache], config: EngineConfig, max_len: int) -> KvLayout:
    """Return the layout with one block a group: it shows how memory would be cut."""
    return make_layout(
        caches,
        block_tokens=config.cache.block_size,
        bytes_available=None,
        num_blocks_override=1,
        max_model_len=max_len,
    )


def _read_bytes(weights: WeightBytes, idle: int) -> int:
    """Return the weight bytes that a decode step of one request reads: neither idle experts nor the embedding table.

    The table is read if it is the head.
    """
    return weights.layers - idle + (weights.head or weights.embedding)


def _prefill_ceiling(decoder: DecoderConfig, device: DeviceRecord, ranks: int) -> float:
    """Return prompt tokens a second if only the matrix products of the layers took time (2 operations a parameter)."""
    fp32 = Formats("float32")
    layers = (weight_bytes(decoder, fp32, 1).layers - idle_bytes(decoder, fp32, 1)) // 4
    return device.bf16_flops * (1 if device.kind == "cpu" else ranks) / (2 * layers)


def _advice(
    plan: MemoryPlan, decoder: DecoderConfig, device: DeviceRecord, config: EngineConfig, quantized: bool
) -> list[Advice]:
    found: list[Advice] = []
    least = min(plan.concurrency, key=lambda row: row.context_tokens)
    seqs = min(1 << (max(1, least.requests).bit_length() - 1), 1024)
    if plan.fits and least.requests > 2 * plan.max_num_seqs and seqs > plan.max_num_seqs:
        held = f"{least.requests} requests of {least.context_tokens} tokens"
        found.append(
            Advice(f"--max-num-seqs {seqs}", f"the KV cache holds {held}; {plan.max_num_seqs} may run at once")
        )
    wanted_len = config.model.max_model_len or decoder.max_position
    if plan.fits and plan.max_model_len >= wanted_len:
        return found
    if plan.kv_tokens >= plan.block_tokens and not plan.fits and plan.free_bytes >= 0:
        found.append(Advice(f"--max-model-len {plan.kv_tokens}", "the longest request that the KV cache holds"))
    if config.cache.kv_cache_memory_bytes is not None and plan.free_bytes < 0:
        most = max(0, plan.kv_bytes + plan.free_bytes)
        found.append(Advice(f"--kv-cache-memory-bytes {most}", "the most that is free beside the weights"))
    formats = choose_formats(decoder, device, config.model, quantized=quantized)
    caches = layer_caches(decoder, formats, plan.tensor_parallel_size)
    needed = request_bytes(_smallest(caches, config, wanted_len), wanted_len, *_steps(config))
    if device.kind == "cpu" and plan.kv_bytes < needed <= plan.kv_bytes + plan.free_bytes:
        found.append(Advice(f"--kv-cache-memory-bytes {needed}", f"one request of {wanted_len} tokens needs it"))
    if plan.weight_format == "float32" and config.model.dtype == "float32":
        found.append(Advice("--dtype bfloat16", "halves weights and KV cache"))
    return found + _more_devices(plan, wanted_len, decoder, device, config, quantized)


def _more_devices(
    plan: MemoryPlan,
    wanted_len: int,
    decoder: DecoderConfig,
    device: DeviceRecord,
    config: EngineConfig,
    quantized: bool,
) -> list[Advice]:
    """Return the smallest tensor-parallel size, and the smallest other device, on which the plan fits."""
    found = []
    for ranks in _larger_sizes(decoder, plan.tensor_parallel_size) if device.kind == "gpu" else ():
        if _fits(decoder, device, plan.memory_bytes, config, ranks, wanted_len, quantized):
            found.append(Advice(f"--tensor-parallel-size {ranks}", f"{ranks} devices hold {wanted_len} tokens"))
            break
    ranks = plan.tensor_parallel_size
    for other in sorted(DEVICES.values(), key=lambda record: record.memory_bytes):
        larger = other.memory_bytes > plan.memory_bytes
        if larger and _fits(decoder, other, other.memory_bytes, config, ranks, wanted_len, quantized):
            why = f"{other.memory_bytes / (1 << 30):.0f} GiB a device hold {wanted_len} tokens"
            found.append(Advice(f"--device {other.name}", why))
            break
    return found


def _larger_sizes(decoder: DecoderConfig, ranks: int) -> Sequence[int]:
    return [size for size in (2, 4, 8, 16, 32, 64) if size > ranks and divides(decoder, size)]


def _fits(
    decoder: DecoderConfig,
    device: DeviceRecord,
    memory_bytes: int,
    config: EngineConfig,
    ranks: int,
    max_len: int,
    quantized: bool,
) -> bool:
    formats = choose_formats(decoder, device, config.model, quantized=quantized)
    sizes = _sizes(decoder, formats, device, memory_bytes, config, ranks)
    shape = _smallest(layer_caches(decoder, formats, ranks), config, max_len)
    return sizes.rest >= request_bytes(shape, max_len, *_steps(config))

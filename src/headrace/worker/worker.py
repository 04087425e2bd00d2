"""The worker of one rank: loads the model, makes the KV memory, executes plans.

Must not know the scheduler, text or sockets; what it needs of the engine comes in as plain data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headrace.attention.select import CommonNeeds, KeyValueSpec, Selection, select_by_spec
from headrace.base.errors import ConfigError, InvariantError
from headrace.base.log import get_logger
from headrace.config.decoder import DecoderConfig, parse_decoder
from headrace.config.engine import EngineConfig
from headrace.models.registry import CausalModel, ModelContext, build_model
from headrace.parallel.groups import TensorParallel
from headrace.platforms.detect import Platform, current_platform
from headrace.platforms.heap import HeapTrimmer
from headrace.types.cache_specs import KvLayout, kind_of
from headrace.types.plans import StepPlan
from headrace.types.results import StepResult
from headrace.types.wire import PhaseSeconds
from headrace.types.worker_facts import WorkerFacts
from headrace.weights.loader import load_weights
from headrace.weights.source import ModelFiles
from headrace.worker.memory import cpu_cache_bytes
from headrace.worker.placement import choose_quantization, rank_threads
from headrace.worker.profile import bind_layout, profiled_cache_bytes
from headrace.worker.runner import StepRunner

_log = get_logger(__name__)


class Phases:
    """Seconds of the named parts of loading, in order."""

    def __init__(self) -> None:
        self.done: list[PhaseSeconds] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part."""
        begun_s = time.perf_counter()
        yield
        self.done.append(PhaseSeconds(name, time.perf_counter() - begun_s))


@dataclass
class Loaded:
    """A model with its weights, and what it runs on."""

    platform: Platform
    decoder: DecoderConfig
    model: CausalModel
    backends: Mapping[KeyValueSpec, Selection]
    dtype: torch.dtype


class Worker:
    """One rank.

    Args:
        config: of the engine.
        files: of the model.
        tp: this rank in its group.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles, tp: TensorParallel) -> None:
        self._config = config
        self._files = files
        self._tp = tp
        self._loaded: Loaded | None = None
        self._runner: StepRunner | None = None
        self._heap = HeapTrimmer(time.monotonic())

    @torch.inference_mode()
    def load(self) -> WorkerFacts:
        """Build the model and load its weights.

        Returns:
            Facts from which the engine sizes the KV cache.

        Raises:
            ConfigError: an option, model or device that cannot work; WeightLoadError and InsufficientMemoryError are
                kinds of it.
        """
        phases, config = Phases(), self._config
        with phases.phase("look at the device"):
            platform = current_platform(config.parallel.device)
            if platform.name == "cpu":
                torch.set_num_threads(rank_threads(config.parallel.cpu_threads, self._tp.size))
            elif self._tp.size > 1:
                raise ConfigError(
                    "--tensor-parallel-size above 1 works on CPUs only so far; use 1, or --device cpu",
                    param="tensor_parallel_size",
                )
            decoder = parse_decoder(self._files.config)
        with phases.phase("build the model"):
            loaded = self._loaded = self._build(platform, decoder)
        with phases.phase("load weights"):
            load_weights(
                self._files,
                loaded.model.weight_targets(),
                ignorable=loaded.model.ignorable_weights,
                seed=config.model.seed,
            )
        with phases.phase("prepare weights"):
            loaded.model.finalize()
        with phases.phase("size the KV cache"):
            cache_bytes = self._cache_bytes(loaded)
        return WorkerFacts(
            layer_caches=loaded.model.layer_caches(),
            cache_bytes=cache_bytes,
            vocab_tokens=decoder.vocab_size,
            max_position=decoder.max_position,
            parameter_bytes=loaded.model.parameter_bytes(),
            dtype=_name(loaded.dtype),
            device=str(platform.device),
            attention_backend=", ".join(sorted({choice.backend for choice in loaded.backends.values()})) or "none",
            phases=phases.done,
        )

    @torch.inference_mode()
    def allocate(self, layout: KvLayout) -> None:
        """Make the KV memory; from now on plans can be executed.

        Args:
            layout: of this rank. A new layout replaces an earlier one.
        """
        loaded = self._model()
        arena = bind_layout(loaded.model, layout, loaded.backends, loaded.platform.device)
        self._runner = StepRunner(
            loaded.model,
            arena,
            slots=self._config.scheduler.max_num_seqs,
            vocab_tokens=loaded.decoder.vocab_size,
            device=loaded.platform.device,
            with_logprobs=self._tp.rank == 0,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `StepRunner.execute`."""
        if self._runner is None:
            raise InvariantError("execute() before allocate()")
        result = self._runner.execute(plan)
        self._heap.tick(time.monotonic())
        return result

    def _build(self, platform: Platform, decoder: DecoderConfig) -> Loaded:
        config = self._config
        quantization = choose_quantization(config.model, platform.name, quantized=self._files.quantized)
        wanted = "float32" if quantization == "int8" else config.model.dtype
        dtype = platform.dtype(wanted, decoder.checkpoint_dtype)
        invariant = platform.name == "cpu" and dtype == torch.float32 and quantization == "none"
        context = ModelContext(
            dtype=dtype, device=platform.device, tp=self._tp, quantization=quantization, invariant=invariant
        )
        model = build_model(decoder, context)
        common = CommonNeeds(platform.name, _name(dtype), _name(model.cache_dtype), batch_invariant=invariant)
        wanted_backend = config.parallel.attention_backend
        backends = select_by_spec(model.layer_caches(), model.attention_needs(), common, wanted=wanted_backend)
        if self._tp.rank == 0:
            _log.info("%s, %s, linears %s", platform.device, _name(dtype), quantization)
            for spec, choice in backends.items():
                refused = "".join(f"; not {name}: {why}" for name, why in choice.refused.items())
                _log.info("%s attention: %s, because it %s%s", kind_of(spec), choice.backend, choice.reason, refused)
        return Loaded(platform, decoder, model, backends, dtype)

    def _cache_bytes(self, loaded: Loaded) -> int:
        config = self._config
        if loaded.platform.name == "cpu":
            # Asked again: what the weights took is no longer available.
            available = current_platform("cpu").available_bytes
            return cpu_cache_bytes(config.cache, available, self._tp.size)
        return profiled_cache_bytes(config, loaded.model, loaded.backends, loaded.platform.device)

    def _model(self) -> Loaded:
        if self._loaded is None:
            raise InvariantError("allocate() before load()")
        return self._loaded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What the offline benchmarks share: the engine in this process, its options, and prompts.

Must not import torch before the engine does.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench.load import token_prompt
from headrace.bench.report import say
from headrace.config import EngineConfig
from headrace.config.decoder import parse_decoder
from headrace.engine.model_bytes import choose_formats
from headrace.platforms.devices import DEVICES
from headrace.types.sampling import SamplingParams
from headrace.weights.source import resolve_model

if TYPE_CHECKING:
    from headrace.llm import LLM


def option_values(config: EngineConfig) -> dict[str, Any]:
    """Return the options that differ from their defaults, by field name, as `headrace.LLM` takes them."""
    values: dict[str, Any] = {}
    for section in (config.model, config.cache, config.scheduler, config.parallel):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if field.name != "model" and value != field.default:
                values[field.name] = value
    return values


class OfflineEngine:
    """The offline `LLM` with the clock around it."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model.

        Args:
            config: options of the engine.

        Raises:
            HeadraceError: as `LLM`.
        """
        from headrace.llm import LLM

        self._config = config
        start_s = time.perf_counter()
        self.llm: LLM = LLM(model=config.model.model, **option_values(config))
        self.load_s = time.perf_counter() - start_s
        say(f"model {config.model.model} loaded in {self.load_s:.2f} s")

    def facts(self) -> dict[str, Any]:
        """Return the report's fields about the engine, "auto" resolved by the engine's own rules."""
        from headrace.platforms.detect import current_platform

        config = self._config
        files = resolve_model(config.model)
        device = current_platform(config.parallel.device).name
        record = DEVICES["cpu" if device == "cpu" else "h200"]  # any GPU: the types do not depend on which
        formats = choose_formats(parse_decoder(files.config), record, config.model, quantized=files.quantized)
        return {
            "model": config.model.model,
            "device": device,
            "dtype": formats.dtype,
            "quantization": "int8" if formats.int8 else "none",
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "load_s": self.load_s,
        }

    def generate(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> tuple[float, int]:
        """Generate exactly the given number of tokens for each prompt.

        Returns:
            Seconds, and output tokens in all.
        """
        params = [
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for tokens in output_lens
        ]
        start_s = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        return elapsed_s, sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        """Stop the engine."""
        self.llm.close()


def random_prompts(lens: Sequence[int], token_ids: tuple[int, int], source: random.Random) -> list[list[int]]:
    """Return prompts of random token ids in [low, high)."""
    return [token_prompt(length, *token_ids, source) for length in lens]


def token_range(llm: LLM) -> tuple[int, int]:
    """Return the range [low, high) of token ids for random prompts: ordinary tokens of most vocabularies."""
    vocab_tokens = int(llm.vocab_tokens)
    low = min(1000, vocab_tokens // 4)
    return low, min(30000, vocab_tokens)

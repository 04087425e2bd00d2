"""Our decoders against transformers in fp32, every weight perturbed: whole, chunked, decoded, batched."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, FAMILIES, Runner, oracle_logits, random_ids, reference

TOLERANCE = 1e-4
BACKENDS = ("torch_sdpa", "torch_exact")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_prefill_chunks_and_decode(case: str, backend: str) -> None:
    oracle = reference(case)
    ids = random_ids(37)
    want = oracle_logits(oracle, ids)
    assert want.abs().mean() > 0.5, "the oracle must be perturbed enough to show a mistake"
    whole = Runner(oracle, backend=backend)
    close(whole.logits([("a", ids)])["a"], want)
    pieces = Runner(oracle, backend=backend)
    got, at = [], 0
    for size in (10, 1, 1, 13, 1, 11):
        got.append(pieces.logits([("a", ids[at : at + size])])["a"])
        at += size
    close(torch.cat(got), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", *FAMILIES])
def test_ragged_batches(case: str, backend: str) -> None:
    oracle = reference(case)
    prompts = {
        name: random_ids(length, seed) for seed, (name, length) in enumerate([("a", 5), ("b", 70), ("c", 1), ("d", 23)])
    }
    want = {name: oracle_logits(oracle, ids) for name, ids in prompts.items()}
    runner = Runner(oracle, backend=backend)
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    # Prefill, decode and chunks of several rows in each step, in another order each time.
    plan = [
        [("b", 40), ("a", 4)],
        [("d", 22), ("a", 1), ("b", 1)],
        [("d", 1), ("b", 1), ("c", 1)],
        [("b", 28)],
    ]
    for rows in plan:
        step = []
        for name, count in rows:
            at = runner.done.get(name, 0)
            step.append((name, prompts[name][at : at + count]))
        for name, logits in runner.logits(step).items():
            got[name].append(logits)
    for name in prompts:
        close(torch.cat(got[name]), want[name])


@pytest.mark.parametrize("case", ["llama", "gemma3", "llama4", "qwen3_next"])
def test_decode_rows_of_very_different_length(case: str) -> None:
    oracle = reference(case)
    lengths = {"a": 3, "b": 200, "c": 60, "d": 199, "e": 9}
    prompts = {name: random_ids(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    runner = Runner(oracle)
    for name, ids in prompts.items():
        runner.hidden([(name, ids[:-1])])
    got = runner.logits([(name, ids[-1:]) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        close(got[name], oracle_logits(oracle, ids)[-1:])


@pytest.mark.parametrize("case", ["qwen3", *FAMILIES])
def test_prefix_from_cache(case: str) -> None:
    oracle = reference(case)
    ids = random_ids(30)
    runner = Runner(oracle)
    runner.hidden([("a", ids[:16])])
    runner.share_prefix("a", "b", 16)
    runner.hidden([("a", random_ids(9, 5))])
    close(runner.logits([("b", ids[16:])])["b"], oracle_logits(oracle, ids)[16:])


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_own_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings(scaling: str) -> None:
    parameters = {"rope_theta": 5000.0, **SCALINGS[scaling]}
    oracle = reference("llama", rope_parameters=parameters)
    ids = random_ids(120)
    runner = Runner(oracle)
    first = runner.logits([("a", ids[:90])])["a"]
    rest = runner.logits([("a", ids[90:])])["a"]
    want = oracle_logits(oracle, ids)
    plain = oracle_logits(reference("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}), ids)
    assert (plain - want).abs().max() > 0.1, "the scaling must matter"
    close(torch.cat((first, rest)), want)


@pytest.mark.parametrize("case", ["llama", "qwen2_tied", "qwen3", "gemma3"])
def test_bfloat16_stays_near(case: str) -> None:
    """bf16 is judged by the size of its own rounding: as near to fp32 as transformers in bf16 is, within a factor."""
    oracle = reference(case)
    ids = random_ids(40)
    want = oracle_logits(oracle, ids)
    runner = Runner(oracle, dtype=torch.bfloat16)
    whole = runner.logits([("a", ids[:25])])["a"]
    steps = [runner.logits([("a", [token])])["a"] for token in ids[25:]]
    got = torch.cat((whole, *steps))
    assert got.dtype == torch.float32
    relative = (got - want).norm() / want.norm()
    assert 0 < relative < 0.06

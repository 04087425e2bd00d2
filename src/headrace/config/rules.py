"""Every invalid combination of options is one row of one table, checked in one function.

The compatibility page of the docs is generated from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from headrace.config.engine import EngineConfig


@dataclass(frozen=True)
class Rule:
    """One refused combination.

    Attributes:
        name: stable id.
        broken: True if the configuration violates the rule.
        param: the option to change.
        message: what is wrong and what to do.
        test: id of the test that checks it.
    """

    name: str
    broken: Callable[[EngineConfig], bool]
    param: str
    message: str
    test: str


RULES: tuple[Rule, ...] = (
    Rule(
        "batched-tokens-below-seqs",
        lambda c: c.scheduler.max_num_batched_tokens < c.scheduler.max_num_seqs,
        "max_num_batched_tokens",
        "--max-num-batched-tokens must be at least --max-num-seqs: each running request needs a token a step",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "speculation-not-in-the-worker",
        lambda c: c.scheduler.speculative_tokens > 0,
        "speculative_tokens",
        "the worker of this version cannot verify drafts, only the simulator can: leave speculative_tokens at 0",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "remote-code",
        lambda c: c.model.trust_remote_code,
        "trust_remote_code",
        "--trust-remote-code is not supported: Headrace never runs code from a model repository; remove the flag",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "float16-on-cpu",
        lambda c: c.parallel.device == "cpu" and c.model.dtype == "float16",
        "dtype",
        "float16 has no fast path on CPUs; use --dtype bfloat16 or float32",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "int8-on-gpu",
        lambda c: c.parallel.device == "cuda" and c.model.quantization == "int8",
        "quantization",
        "--quantization int8 is a CPU path; remove it or use --device cpu",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "int8-with-dtype",
        lambda c: c.model.quantization == "int8" and c.model.dtype not in ("auto", "float32"),
        "dtype",
        "--quantization int8 computes its activations in float32; remove --dtype",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "events-without-prefix-cache",
        lambda c: c.events.kv_events is not None and not c.cache.enable_prefix_caching,
        "kv_events",
        "--kv-events tells what the prefix cache holds; remove it or --no-enable-prefix-caching",
        "tests/unit/config/test_rules.py",
    ),
    Rule(
        "gguf-format-of-directory",
        lambda c: c.model.load_format == "gguf" and not c.model.model.endswith(".gguf") and c.model.model != "default",
        "load_format",
        "--load-format gguf needs a .gguf file as MODEL",
        "tests/unit/config/test_rules.py",
    ),
)
"""Every refused combination of options, in the order in which they are checked."""


def check_rules(config: EngineConfig) -> None:
    """Refuse a configuration that breaks a rule of `RULES`.

    Raises:
        ConfigError: for the first broken rule; ``param`` names the option.
    """
    for rule in RULES:
        if rule.broken(config):
            raise ConfigError(rule.message, param=rule.param)

"""The sampling flags of ``chat`` and ``complete``, and the request fields they make."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace.config.flags import section_from
from headrace.config.option import option


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen."""

    temperature: float | None = option(None, "0 is greedy (default: the model's own, else 1).", low=0.0)
    top_p: float | None = option(
        None, "Keep the likeliest tokens that reach this probability together.", low=0.0, high=1.0
    )
    top_k: int | None = option(None, "Keep the k likeliest tokens.", low=-1)
    min_p: float | None = option(None, "Drop tokens below this share of the likeliest.", low=0.0, high=1.0)
    repetition_penalty: float | None = option(None, "Above 1 makes repetition less likely.", low=0.0)
    max_tokens: int | None = option(None, "Most tokens of an answer (default: up to the model's length).", low=1)
    stop: tuple[str, ...] = option(factory=tuple, help="Text that ends the answer; may be given several times.")
    sampling_seed: int | None = option(None, "Makes the answer reproducible.")


def sampling_fields(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that were given, by the names of `SamplingParams` and of the HTTP API.

    Raises:
        ConfigError: a value out of range.
    """
    options = section_from(flags, SamplingOptions)
    fields = {
        name: value
        for name, value in dataclasses.asdict(options).items()
        if value is not None and name != "sampling_seed"
    }
    if options.sampling_seed is not None:
        fields["seed"] = options.sampling_seed
    fields["stop"] = list(options.stop)
    return {name: value for name, value in fields.items() if value != []}

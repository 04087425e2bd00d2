"""Headrace: an LLM inference and serving engine.

The public names are loaded on first use, so that ``import headrace`` takes milliseconds and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.base.errors import HeadraceError
    from headrace.llm import LLM
    from headrace.types.sampling import SamplingParams

_LAZY = {
    "LLM": "headrace.llm",
    "SamplingParams": "headrace.types.sampling",
    "HeadraceError": "headrace.base.errors",
}

__all__ = ["LLM", "HeadraceError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)

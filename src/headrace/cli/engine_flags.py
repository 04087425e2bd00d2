"""The flags that every command with an engine shares, and the configuration they make."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.parser import CommandParser
from headrace.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, check_rules
from headrace.config.flags import section_from

ENGINE_TOPICS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
}


def add_engine_flags(parser: CommandParser) -> None:
    """Add the flags of all engine sections, one topic a section."""
    for topic, section in ENGINE_TOPICS.items():
        parser.add_topic(topic, section)


def engine_config(
    flags: argparse.Namespace,
    model: str,
    *,
    cache: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> EngineConfig:
    """Build and check the engine's configuration.

    Args:
        flags: parsed flags of `add_engine_flags`.
        model: the MODEL argument.
        cache: defaults of this command for `CacheConfig` fields whose flag is not given.
        scheduler: the same for `SchedulerConfig`.

    Raises:
        ConfigError: a value out of range, or a combination that `RULES` refuses.
    """
    config = EngineConfig(
        model=section_from(flags, ModelConfig, model=model),
        cache=section_from(flags, CacheConfig, **(cache or {})),
        scheduler=section_from(flags, SchedulerConfig, **(scheduler or {})),
        parallel=section_from(flags, ParallelConfig),
    )
    check_rules(config)
    return config

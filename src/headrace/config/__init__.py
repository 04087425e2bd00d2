"""Configuration: one frozen dataclass a topic, one table of cross-option rules, flags generated from the fields.

A component receives only its own section; there is no global configuration.
"""

from headrace.config.engine import (
    CacheConfig,
    EngineConfig,
    KvEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from headrace.config.rules import RULES, Rule, check_rules
from headrace.config.server import ServerConfig

__all__ = [
    "RULES",
    "CacheConfig",
    "EngineConfig",
    "KvEventsConfig",
    "ModelConfig",
    "ParallelConfig",
    "Rule",
    "SchedulerConfig",
    "ServerConfig",
    "check_rules",
]

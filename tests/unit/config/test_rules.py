"""Every rule of the table has a configuration here that breaks exactly that rule."""

import dataclasses

import pytest

from headrace.base.errors import ConfigError
from headrace.config import (
    RULES,
    CacheConfig,
    EngineConfig,
    KvEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    check_rules,
)
from headrace.config.flags import options_of


def config(*, scheduler=None, parallel=None, cache=None, events=None, **model):
    model.setdefault("model", "default")
    return EngineConfig(
        model=ModelConfig(**model),
        cache=CacheConfig(**(cache or {})),
        scheduler=SchedulerConfig(**(scheduler or {})),
        parallel=ParallelConfig(**(parallel or {})),
        events=KvEventsConfig(**(events or {})),
    )


BREAKERS = {
    "batched-tokens-below-seqs": config(scheduler={"max_num_seqs": 65, "max_num_batched_tokens": 64}),
    "speculation-not-in-the-worker": config(scheduler={"speculative_tokens": 1}),
    "remote-code": config(trust_remote_code=True),
    "float16-on-cpu": config(dtype="float16", parallel={"device": "cpu"}),
    "int8-on-gpu": config(quantization="int8", parallel={"device": "cuda"}),
    "int8-with-dtype": config(quantization="int8", dtype="bfloat16"),
    "events-without-prefix-cache": config(
        cache={"enable_prefix_caching": False}, events={"kv_events": "tcp://127.0.0.1:0"}
    ),
    "gguf-format-of-directory": config(load_format="gguf", model="some/directory"),
}


def test_every_rule_has_a_breaker():
    assert list(BREAKERS) == [rule.name for rule in RULES], "write a configuration that breaks the new rule"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_breaker_breaks_exactly_its_rule(rule):
    assert [other.name for other in RULES if other.broken(BREAKERS[rule.name])] == [rule.name]
    with pytest.raises(ConfigError) as caught:
        check_rules(BREAKERS[rule.name])
    assert (caught.value.param, str(caught.value)) == (rule.param, rule.message)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rows_are_complete(rule, pytestconfig):
    sections = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, KvEventsConfig)
    flags = {field.name for section in sections for field in options_of(section)}
    hidden = {field.name for section in sections for field in dataclasses.fields(section)} - flags
    assert rule.param in flags | hidden
    assert (rule.param if rule.param in hidden else "--") in rule.message, "say which flag to change"
    assert (pytestconfig.rootpath / rule.test).is_file()


@pytest.mark.parametrize(
    "good",
    [
        config(),
        config(scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64}),
        config(dtype="float16", parallel={"device": "cuda"}),
        config(quantization="int8", dtype="float32"),
        config(load_format="gguf", model="m.gguf"),
        config(load_format="gguf"),
    ],
)
def test_the_neighbours_of_each_rule_are_accepted(good):
    check_rules(good)

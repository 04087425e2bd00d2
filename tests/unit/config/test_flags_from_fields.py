"""Flags are generated from fields: every field has a default, a help and a flag, and is checked."""

import argparse
import dataclasses
import typing

import pytest

from headrace.base.errors import ConfigError
from headrace.config import (
    CacheConfig,
    EngineConfig,
    KvEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from headrace.config.flags import add_flags, check_section, flag_name, options_of, parse_count, section_from

SECTIONS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, KvEventsConfig, ServerConfig)
FIELDS = [
    pytest.param(section, field, id=f"{section.__name__}.{field.name}")
    for section in SECTIONS
    for field in dataclasses.fields(section)
]
RANGED = [
    item for item in FIELDS if item.values[1].metadata["low"] is not None or item.values[1].metadata["high"] is not None
]
CHOSEN = [item for item in FIELDS if item.values[1].metadata["choices"] is not None]


def parse(section, *words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, section)
    return section_from(parser.parse_args(list(words)), section)


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_every_field_is_a_complete_option(section, field):
    assert field.metadata, "declare it with option(...)"
    assert field.metadata["help"].rstrip().endswith((".", ")"))
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    assert has_default
    assert check_section(section()) == section(), "the defaults are within their own ranges"
    assert field.metadata["hidden"] or field in options_of(section)
    assert flag_name(field) == "--" + field.name.replace("_", "-")


def test_flags_are_unique_over_all_sections():
    parser = argparse.ArgumentParser()
    for section in SECTIONS:
        add_flags(parser, section)  # argparse raises on a conflict
    assert "--max-num-seqs" in parser.format_help()


def test_flags_that_are_not_given_leave_no_trace():
    parser = argparse.ArgumentParser()
    for section in SECTIONS:
        add_flags(parser, section)
    assert vars(parser.parse_args([])) == {}


@pytest.mark.parametrize(("section", "field"), RANGED)
def test_ranges_are_enforced_and_name_the_flag(section, field):
    low, high = field.metadata["low"], field.metadata["high"]
    outside = ([low - 1] if low is not None else []) + ([high + 1] if high is not None else [])
    for value in outside:
        with pytest.raises(ConfigError, match=flag_name(field)) as caught:
            check_section(section(**{field.name: value}))
        assert caught.value.param == field.name
        assert repr(value) in str(caught.value)
    for value in (low, high):
        if value is not None:
            check_section(section(**{field.name: value}))


@pytest.mark.parametrize(("section", "field"), CHOSEN)
def test_choices_are_enforced_and_listed(section, field):
    with pytest.raises(ConfigError, match=field.metadata["choices"][0]):
        check_section(section(**{field.name: "no-such-choice"}))
    for choice in field.metadata["choices"]:
        assert getattr(parse(section, flag_name(field), choice), field.name) == choice


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        (CacheConfig, "block_size", "16"),
        (CacheConfig, "block_size", 16.0),
        (CacheConfig, "block_size", True),
        (CacheConfig, "block_size", None),
        (CacheConfig, "cpu_memory_share", float("nan")),
        (CacheConfig, "cpu_memory_share", "0.3"),
        (CacheConfig, "enable_prefix_caching", 1),
        (ServerConfig, "request_timeout_s", float("inf")),
        (ServerConfig, "allowed_origins", "http://example.org"),
        (ServerConfig, "host", 127),
        (ModelConfig, "dtype", 16),
    ],
)
def test_types_are_checked_for_options_given_in_python(section, name, value):
    with pytest.raises(ConfigError, match="must be") as caught:
        check_section(section(**{name: value}))
    assert caught.value.param == name


def test_an_int_is_a_float():
    assert check_section(ServerConfig(request_timeout_s=3)).request_timeout_s == 3


COUNTS = [
    ("0", 0),
    ("-1", -1),
    ("4096", 4096),
    ("32k", 32_000),
    ("32K", 32_768),
    ("1.005k", 1005),
    ("0.5G", 1 << 29),
    ("3m", 3_000_000),
    ("512M", 512 << 20),
    ("2g", 2_000_000_000),
    ("9007199254740993k", 9007199254740993000),
]


@pytest.mark.parametrize(("text", "value"), COUNTS)
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text", ["", "G", "x", "1.5", "1e3", "1.0001k", "infG", "nanK", "-infk", "1GG", "1 G x", "1_0k0"]
)
def test_counts_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_count(text)


def test_values_reach_their_fields():
    cache = parse(CacheConfig, "--kv-cache-memory-bytes", "4G", "--no-enable-prefix-caching", "--block-size", "32")
    assert cache == CacheConfig(kv_cache_memory_bytes=4 << 30, enable_prefix_caching=False, block_size=32)
    assert parse(ParallelConfig, "-tp", "2").tensor_parallel_size == 2
    server = parse(ServerConfig, "--api-key", "a", "--api-key", "b", "--port", "0")
    assert (server.api_key, server.port) == (("a", "b"), 0)


def test_extra_values_fill_fields_without_a_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser, ModelConfig)
    assert section_from(parser.parse_args([]), ModelConfig, model="default").model == "default"


def test_parsed_ranges_are_checked_too():
    with pytest.raises(ConfigError, match="--port must be at most 65535"):
        parse(ServerConfig, "--port", "65536")


def test_secrets_stay_out_of_logs_and_errors():
    model = ModelConfig(model="m", hf_token="hf_secret")
    server = ServerConfig(api_key=("sk-secret",))
    assert "secret" not in repr(EngineConfig(model=model)) + repr(server)
    with pytest.raises(ConfigError) as caught:
        check_section(ServerConfig(api_key="sk-secret"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_sections_are_frozen_and_hashable(section):
    hash(section())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section(), dataclasses.fields(section)[0].name, 1)


def test_the_engine_configuration_holds_one_section_a_topic():
    hints = typing.get_type_hints(EngineConfig)
    assert set(hints.values()) == set(SECTIONS) - {ServerConfig}

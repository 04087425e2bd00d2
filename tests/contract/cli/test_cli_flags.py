"""The flags of every command are a contract: a flag that goes or changes its name breaks somebody's script."""

import importlib
import json
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS

GOLDEN = Path(__file__).with_name("cli_flags.json")


def parsers():
    """Every parser of the command line, by the words that lead to it."""
    found = {}
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module)
        if name == "bench":
            found.update({f"bench {kind}": build() for kind, build in module.PARSERS.items()})
        else:
            found[name] = module.build_parser()
    return found


def test_flags_are_those_of_the_golden_list():
    """After a deliberate change, write the new list: python -m pytest prints it."""
    flags = {name: parser.flags() for name, parser in parsers().items()}
    golden = json.loads(GOLDEN.read_text())
    changes = {
        name: {
            "gone": sorted(set(golden.get(name, [])) - set(flags.get(name, []))),
            "added": sorted(set(flags.get(name, [])) - set(golden.get(name, []))),
        }
        for name in golden.keys() | flags.keys()
        if golden.get(name) != flags.get(name)
    }
    assert changes == {}, (
        f"flags changed; if that is meant, put this into {GOLDEN.name}:\n{json.dumps(flags, indent=1)}"
    )


def test_commands_are_those_of_the_issue():
    assert set(COMMANDS) == {"serve", "chat", "complete", "bench", "plan", "sim", "doctor"}


@pytest.mark.parametrize(
    "words", ["serve", "chat", "complete", "plan", "sim", "doctor", "bench latency", "bench serve"]
)
def test_help_of_each_command_lists_all_its_flags(headrace, words):
    ran = headrace(*words.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    for flag in parsers()[words].flags():
        assert flag in ran.out
    assert "CONFIG." not in ran.out, "names of classes are no help"


@pytest.mark.parametrize(
    ("topic", "has", "has_not"),
    [
        ("cache", "--block-size", "--host"),
        ("server", "--host", "--block-size"),
        ("scheduler", "--max-num-seqs", "--port"),
        ("kv", "--kv-cache-memory-bytes", "--host"),
        ("all", "--host", "no-such-flag"),
    ],
)
def test_help_by_topic_and_by_word(headrace, topic, has, has_not):
    ran = headrace("serve", f"--help={topic}")
    assert ran.code == 0
    assert has in ran.out
    assert has_not not in ran.out


def test_help_about_nothing_names_the_topics(headrace):
    ran = headrace("serve", "--help=cach3")
    assert ran.code == 2
    assert "did you mean cache?" in ran.err


def test_numbers_take_suffixes_and_underscores_are_dashes():
    from headrace.cli.engine_flags import engine_config
    from headrace.cli.serve import build_parser

    flags = build_parser().parse(["m", "--max_model_len", "4k", "--kv-cache-memory-bytes=2G", "-tp", "2"])
    config = engine_config(flags, flags.model)
    assert config.model.max_model_len == 4000
    assert config.cache.kv_cache_memory_bytes == 2 << 30
    assert config.parallel.tensor_parallel_size == 2


def test_option_values_round_trip_through_the_command_line():
    from headrace.bench.offline import option_values
    from headrace.cli.bench import flag_words
    from headrace.cli.engine_flags import engine_config
    from headrace.cli.serve import build_parser

    words = ["--dtype", "float32", "--no-enable-prefix-caching", "--max-num-seqs", "8", "--watermark", "0.25"]
    flags = build_parser().parse(["m", *words])
    values = option_values(engine_config(flags, "m"))
    assert values == {"dtype": "float32", "enable_prefix_caching": False, "max_num_seqs": 8, "watermark": 0.25}
    again = build_parser().parse(["m", *flag_words(values)])
    assert option_values(engine_config(again, "m")) == values


def test_serve_hands_its_configuration_to_the_server(headrace, monkeypatch):
    import headrace.serve.server as server

    seen = []
    monkeypatch.setattr(server, "run_server", lambda *configs: seen.append(configs) or 0)
    assert headrace("serve", "some-model", "--port", "0", "--api-key", "a", "--api-key", "b").code == 0
    [(engine, http)] = seen
    assert engine.model.model == "some-model"
    assert (http.port, http.api_key) == (0, ("a", "b"))


def test_the_default_model_is_served_without_an_argument(headrace, monkeypatch):
    import headrace.serve.server as server

    seen = []
    monkeypatch.setattr(server, "run_server", lambda *configs: seen.append(configs) or 0)
    headrace("serve")
    assert seen[0][0].model.model == "default"

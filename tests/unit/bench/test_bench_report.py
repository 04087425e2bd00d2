"""Percentiles, and the JSON document that ends every benchmark."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.bench import report as reports

DOCS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"


def cell():
    fields = {name: 2.5 for name in reports.SchedulerCell.__struct_fields__}
    return reports.SchedulerCell(**fields | {"context_tokens": 512})


def example(kind):
    """A report of a kind, filled by the types of its fields."""
    made = {}
    for name, annotation in kind.__annotations__.items():
        if name in ("NAME", "schema"):
            continue
        samples = {
            "str": "s",
            "int": 3,
            "float": 1.5,
            "float | None": None,
            "int | None": None,
            "str | None": None,
            "dict[str, Percentiles]": {"ttft_ms": reports.summarize([1.0, 2.0])},
            "list[StartRun]": [reports.StartRun(kind="warm", ready_s=1.0, first_answer_s=2.0)],
            "list[SchedulerCell]": [cell()],
            "Environment": reports.environment(),
        }
        made[name] = samples[annotation]
    return kind(**made)


def test_percentiles_by_hand():
    row = reports.summarize([4.0, 1.0, 3.0, 2.0])
    assert (row.samples, row.mean, row.median, row.min, row.max) == (4, 2.5, 2.5, 1.0, 4.0)
    assert row.p90 == pytest.approx(3.7)
    assert row.p99 == pytest.approx(3.97)


def test_percentiles_of_one_and_of_none():
    assert reports.summarize([5.0]) == reports.Percentiles(
        samples=1, mean=5.0, median=5.0, p90=5.0, p99=5.0, min=5.0, max=5.0
    )
    assert reports.summarize([]).samples == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_percentiles_agree_with_the_standard_library(values):
    row = reports.summarize(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert row.median == pytest.approx(statistics.median(values), abs=1e-6)
    assert row.p90 == pytest.approx(cuts[89], abs=1e-6)
    assert row.p99 == pytest.approx(cuts[98], abs=1e-6)


@pytest.mark.parametrize("kind", reports.REPORTS, ids=lambda kind: kind.__name__)
def test_a_report_is_one_line_and_reads_back(kind):
    made = example(kind)
    line = reports.to_json_line(made)
    assert "\n" not in line
    assert reports.parse_report(line) == made
    assert json.loads(line)["schema"] == kind.NAME


@pytest.mark.parametrize("kind", reports.REPORTS, ids=lambda kind: kind.__name__)
def test_a_report_with_a_field_missing_or_wrong_is_refused(kind):
    document = msgspec.to_builtins(example(kind))
    for name in document:
        if name == "schema":
            continue
        with pytest.raises(ConfigError):
            reports.parse_report(json.dumps({key: value for key, value in document.items() if key != name}))
    wrong = "model" if "model" in document else "running"
    with pytest.raises(ConfigError, match=wrong):
        reports.parse_report(json.dumps({**document, wrong: [3]}))


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"schema": "headrace.bench.other/1"}', "no json"])
def test_other_lines_are_refused(line):
    with pytest.raises(ConfigError):
        reports.parse_report(line)


@pytest.mark.parametrize("kind", reports.REPORTS, ids=lambda kind: kind.__name__)
def test_every_field_is_documented(kind):
    heading = kind.NAME.split(".")[-1].split("/")[0]
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## )", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([a-z0-9_]+)`", section))
    assert {name for name in kind.__struct_fields__ if name not in named} == set()
    assert kind.NAME in section


def test_the_keys_that_the_issue_asks_for():
    assert {"ttft_ms", "decode_ms_per_step", "tokens_per_s"} <= set(reports.LatencyReport.__struct_fields__)


def test_figures_are_rounded_to_six_digits():
    made = msgspec.structs.replace(example(reports.ServeReport), elapsed_s=1.23456789)
    assert json.loads(reports.to_json_line(made))["elapsed_s"] == 1.23457


def test_standard_output_is_reserved_for_the_last_line():
    code = (
        "import os, subprocess\nfrom headrace.bench.report import stdout_reserved\n"
        "with stdout_reserved():\n"
        "    print('python'); os.write(1, b'descriptor\\n'); subprocess.run(['echo', 'child'])\n"
        "print('last')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "last\n"
    assert sorted(done.stderr.split()) == ["child", "descriptor", "python"]


def test_the_environment_names_torch_without_loading_it():
    made = reports.environment()
    assert made.torch
    assert made.cores >= 1

"""Write the generated tables of the documentation, or check that they are fresh.

A page says where its table goes with a pair of comments, ``<!-- generated: NAME -->`` and ``<!-- end generated -->``;
everything outside them is written by hand. Each table comes from the one source that the code itself uses.

    python tools/generate_docs.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.base import env, errors
from headrace.config import (
    RULES,
    CacheConfig,
    KvEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from headrace.config.decoder import ARCHITECTURES
from headrace.config.flags import flag_name, options_of
from headrace.types.outputs import SchedulerStats
from headrace.types.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, KvEventsConfig, ServerConfig)
_REGION = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; a pipe in a cell is escaped."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((docstring or "").strip().split("\n\n")[0].split())


def error_table() -> str:
    """Table of every error class, in the order of the hierarchy's file."""
    rows = []
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.HeadraceError):
            retry = "yes" if cls.retryable else "no"
            code, kind = f"`{cls.code}`", f"`{cls.kind}`"
            rows.append((code, str(cls.http_status), kind, retry, f"`{cls.__name__}`", first_paragraph(cls.__doc__)))
    return table(("code", "status", "type", "retry", "class", "when"), rows)


def env_table() -> str:
    """Table of the environment variables that Headrace reads."""
    rows = [(f"`{row.name}`", "unset" if row.default is None else f"`{row.default}`", row.doc) for row in env.TABLE]
    return table(("variable", "default", "meaning"), rows)


def _default_text(field: dataclasses.Field[Any]) -> str:
    default = field.default if field.default is not dataclasses.MISSING else None
    return "" if default is None or default == "" else f"`{default}`"


def _allowed_text(field: dataclasses.Field[Any]) -> str:
    low, high, choices = field.metadata["low"], field.metadata["high"], field.metadata["choices"]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if low is None and high is None:
        return ""
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"{low} to {high}"


def option_tables() -> str:
    """One table a section, a row a flag."""
    parts = []
    for section in SECTIONS:
        rows = []
        for field in options_of(section):
            names = f"`{flag_name(field)}`"
            if field.metadata["short"]:
                names += f", `-{field.metadata['short']}`"
            if isinstance(field.default, bool):
                names += f", `--no-{flag_name(field).removeprefix('--')}`"
            rows.append((names, _default_text(field), _allowed_text(field), field.metadata["help"]))
        title = first_paragraph(section.__doc__).rstrip(".")
        parts.append(f"## {title}\n\n" + table(("flag", "default", "allowed", "meaning"), rows))
    return "\n" + "\n".join(parts)


def rule_table() -> str:
    """Table of the combinations that are refused, each with the test that proves it."""
    rows = [(f"`{rule.name}`", "refused", rule.message, f"`{rule.test}`") for rule in RULES]
    return table(("combination", "state", "what the error says", "tested by"), rows)


def architecture_list() -> str:
    """List of the architecture names that a config.json may carry."""
    return "".join(f"- `{name}`\n" for name in ARCHITECTURES)


def sampling_texts() -> dict[str, str]:
    """Meaning of each sampling parameter, from the docstring of the class."""
    found = re.findall(r"^        (\w+): (.+(?:\n {12}.+)*)", SamplingParams.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def sampling_table() -> str:
    """Table of the sampling parameters: name, default, meaning."""
    texts, defaults = sampling_texts(), SamplingParams()
    names = SamplingParams.__struct_fields__
    rows = [(f"`{name}`", f"`{getattr(defaults, name)}`", texts[name]) for name in names]
    return table(("parameter", "default", "meaning"), rows)


_FIELD_TEXT = {
    "messages": "The conversation, oldest message first.",
    "stream_options": "`include_usage` sends the token counts at the end, `continuous_usage_stats` with every event.",
    "request_id": "Your id of the request, for the log.",
    "tools": "Refused with status 501, unless `tool_choice` is `none`.",
    "tool_choice": "Only `none`.",
}


def _json_type(schema: dict[str, Any]) -> str:
    """Write the type of a JSON schema in a few words; null is left out, since every field may be absent."""
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_json_type(item) for item in schema.get("anyOf", schema.get("oneOf", []))]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind not in ("", "null")))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        inner = _json_type(schema.get("items", {}))
        return f"list of {inner}" if inner else "list"
    return str(schema.get("type") or ("object" if "$ref" in schema else ""))


def _field_rows(model: Any, skip: set[str]) -> list[tuple[str, ...]]:
    """Rows of the fields of a request body that are implemented."""
    texts = sampling_texts()
    rows = []
    for name, schema in model.model_json_schema()["properties"].items():
        if name in skip or name in model.refused:
            continue
        text = schema.get("description") or texts.get(name) or _FIELD_TEXT.get(name)
        if not text:
            sys.exit(f"generate_docs: the request field {name!r} has no description")
        rows.append((f"`{name}`", _json_type(schema), text[:1].upper() + text[1:]))
    return rows


def http_tables() -> str:
    """Fields of the two text endpoints, then those that are known and refused."""
    from headrace.serve.openai.chat_schema import ChatCompletionRequest
    from headrace.serve.openai.completions_schema import CompletionRequest
    from headrace.serve.openai.schema_common import SamplingFields

    common = set(SamplingFields.model_fields)
    header = ("field", "type", "meaning")
    parts = [
        "### Fields of both text endpoints\n\n" + table(header, _field_rows(SamplingFields, set())),
        "### Further fields of `/v1/completions`\n\n" + table(header, _field_rows(CompletionRequest, common)),
        "### Further fields of `/v1/chat/completions`\n\n" + table(header, _field_rows(ChatCompletionRequest, common)),
    ]
    refused = {**CompletionRequest.refused, **ChatCompletionRequest.refused}
    rows = []
    for name, refusal in sorted(refused.items()):
        harmless = [f"`{value}`" for value in refusal.harmless if value is not None]
        rows.append((f"`{name}`", refusal.feature, ", ".join(harmless)))
    parts.append("### Not yet\n\nKnown to the API and refused with status 501, unless the value asks for nothing.\n\n")
    parts[-1] += table(("field", "what it would do", "accepted values"), rows)
    return "\n".join(parts)


def attention_table() -> str:
    """Table of the capability records of the attention backends."""
    from headrace.attention.capability import BACKENDS

    def names(items: frozenset[str]) -> str:
        return ", ".join(sorted(items))

    rows = []
    for name, record in sorted(BACKENDS.items(), key=lambda item: -item[1].priority):
        masks = ("causal", "sliding_window", "chunked_local", "soft_cap", "sinks")
        able = ", ".join(mask.replace("_", " ") for mask in masks if getattr(record, mask))
        invariant = "yes" if record.batch_invariant else "no"
        rows.append((f"`{name}`", names(record.devices), names(record.dtypes), able, invariant, str(record.priority)))
    return table(("backend", "devices", "types", "masks and scores", "batch-invariant", "priority"), rows)


def metric_table() -> str:
    """Table of the metrics, read from the exposition text of a fresh registry."""
    from headrace.observe.metrics import ServerMetrics  # the one import here that needs a third-party library

    metrics = ServerMetrics("m", stats=SchedulerStats, restarts=lambda: 0)
    text = metrics.render().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    rows = [(f"`{name}`", kinds[name], helps[name]) for name in sorted(kinds) if not name.endswith("_created")]
    return table(("metric", "type", "meaning"), rows)


GENERATORS: dict[str, Callable[[], str]] = {
    "errors": error_table,
    "environment": env_table,
    "options": option_tables,
    "rules": rule_table,
    "architectures": architecture_list,
    "sampling": sampling_table,
    "metrics": metric_table,
    "http": http_tables,
    "attention": attention_table,
}


def regenerate(text: str, used: set[str]) -> str:
    """Return a page with fresh tables, and note which ones it has.

    Raises:
        SystemExit: a page asks for a table that nobody makes.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in GENERATORS:
            sys.exit(f"generate_docs: no table is called {name!r}; there are {', '.join(GENERATORS)}")
        used.add(name)
        return f"{match[1]}\n{GENERATORS[name]().strip(chr(10))}\n\n{match[4]}"

    return _REGION.sub(fill, text)


def main() -> int:
    """Write the pages, or with ``--check`` only say which are stale; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is stale")
    args = parser.parse_args()
    used: set[str] = set()
    stale = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        fresh = regenerate(text, used)
        if fresh != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not args.check:
                path.write_text(fresh, encoding="utf-8")
    for name in sorted(set(GENERATORS) - used):
        print(f"generate_docs: no page has the table {name!r}")
    state = "stale" if args.check else "written"
    print(
        f"generate_docs: {len(GENERATORS)} tables, {len(stale)} pages {state}"
        + "".join(f"\n  {name}" for name in stale)
    )
    if args.check and stale:
        print("run: python tools/generate_docs.py")
    return 1 if (args.check and stale) or used != set(GENERATORS) else 0


if __name__ == "__main__":
    sys.exit(main())

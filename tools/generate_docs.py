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
SECTIONS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, ServerConfig)
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


def sampling_table() -> str:
    """Table of the sampling parameters: name, default, meaning."""
    doc = SamplingParams.__doc__ or ""
    found = dict(re.findall(r"^        (\w+): (.+(?:\n {12}.+)*)", doc, re.MULTILINE))
    defaults = SamplingParams()
    rows = []
    for name in SamplingParams.__struct_fields__:
        default = getattr(defaults, name)
        rows.append((f"`{name}`", f"`{default}`", " ".join(found[name].split())))
    return table(("parameter", "default", "meaning"), rows)


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

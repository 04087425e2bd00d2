"""Check the project's vocabulary and structure: names, words, port literals, absolute paths; report sizes.

Each check carries a good and a bad sample; ``--self-test`` proves that it passes the one and catches the other, since a
check that never fires is invisible. Sizes are a report, not a gate. Must not import the package.

    python tools/check_words.py [--self-test] [--sizes]
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "scripts", "examples", "benchmarks", "docs", ".ci")
TOP_FILES = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "mkdocs.yml")
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".cfg", ""}
FILE_GUIDE_LINES, FILE_ASK_LINES = 300, 500
FUNCTION_GUIDE_LINES, FUNCTION_ASK_LINES = 40, 60


@dataclass(frozen=True)
class Sample:
    """A file that exists only in a self-test."""

    path: str
    text: str


@dataclass(frozen=True)
class Check:
    """One rule.

    Attributes:
        name: stable id.
        why: one sentence, printed with each finding.
        find: yields (line number, what) for a file; the path is relative to the project and uses slashes.
        good: must give no finding.
        bad: must give at least one each.
    """

    name: str
    why: str
    find: Callable[[str, str], Iterator[tuple[int, str]]]
    good: tuple[Sample, ...]
    bad: tuple[Sample, ...]


_BANNED_STEM = re.compile(r"(^|_)(misc|helpers?|utils?\d*|new|old|stuff|common2)(_|$)")


def file_names(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Find catch-all names of files and folders."""
    for part in Path(path).with_suffix("").parts:
        if _BANNED_STEM.search(part):
            yield 1, f"name {part!r} says nothing about the content"


def page_word(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Find ``page`` in identifiers outside the rooms where it means a kernel layout."""
    if not path.startswith("src/headrace/") or not path.endswith(".py"):
        return
    if path.startswith(("src/headrace/ops/", "src/headrace/attention/")):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", token.string) if token.type == tokenize.NAME else []
        if {part.lower() for part in parts} & {"page", "pages", "paged"}:
            yield token.start[0], f"identifier {token.string!r}: the KV unit is a block"


_PORT = re.compile(
    r"""(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1\]):(?P<a>[1-9]\d*)
      | \bport\s*=\s*(?P<b>[1-9]\d*)\b
      | --port["',\s=]+(?P<c>[1-9]\d*)
      | \bbind\(\s*\(\s*[^,]+,\s*(?P<d>[1-9]\d*)""",
    re.VERBOSE,
)


def port_literals(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Find port numbers in tests. Ports 1 and 9 may stand for "nobody listens"; above 65535 cannot be bound."""
    if not path.startswith("tests/"):
        return
    for number, line in enumerate(text.splitlines(), 1):
        for match in _PORT.finditer(line):
            port = int(next(group for group in match.groups() if group))
            if port not in (1, 9) and port <= 65535:
                yield number, f"port {port}: bind 0 and ask which one it is"


_ROOTS = "|".join(("work", "home", "root", "Users", "mnt", "opt", "srv"))
_ABSOLUTE = re.compile(rf"(?<![\w./~:@-])/(?:{_ROOTS})/[\w.-]+")


def absolute_paths(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Find paths of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _ABSOLUTE.finditer(line):
            yield number, f"absolute path {match.group()!r}"


_LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")


def leftovers(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Find marks of unfinished work: an issue is the place for those."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LEFTOVER.search(line):
            yield number, f"{match.group()}: finish it or open an issue"


CHECKS = (
    Check(
        "file-names",
        "a name says what is inside",
        file_names,
        (Sample("src/headrace/kv/block_pool.py", ""), Sample("src/headrace/text/renewal.py", "")),
        (
            Sample("src/headrace/kv/helpers.py", ""),
            Sample("src/headrace/utils2/x.py", ""),
            Sample("tests/pool_new.py", ""),
        ),
    ),
    Check(
        "page-word",
        "page means the kernel layout only (docs, Words)",
        page_word,
        (
            Sample("src/headrace/kv/pool.py", "# a page of the docs\nblock_tokens = 16\npaging = 'page'\n"),
            Sample("src/headrace/attention/layout.py", "page_size = 16\n"),
        ),
        (
            Sample("src/headrace/kv/pool.py", "page_size = 16\n"),
            Sample("src/headrace/kv/a.py", "class PagedPool:\n    pass\n"),
        ),
    ),
    Check(
        "port-literals",
        "two runs on one machine must not collide",
        port_literals,
        (
            Sample(
                "tests/contract/test_x.py",
                'serve(port=0)\nargs = ["--port", "0", "--port", "65536"]\nurl = f"127.0.0.1:{port}"\n',
            ),
            Sample("src/headrace/config/server.py", "port=8000"),
        ),
        (
            Sample("tests/a.py", 'url = "http://127.0.0.1:8000/v1"'),
            Sample("tests/b.py", "serve(port=8123)"),
            Sample("tests/c.py", '["--port", "8000"]'),
            Sample("tests/d.py", 's.bind(("", 5000))'),
        ),
    ),
    Check(
        "absolute-paths",
        "the project runs from any directory",
        absolute_paths,
        (Sample("docs/a.md", "see https://example.org/home/x and /v1/models, ~/work/x, ./root/y\n"),),
        (Sample("docs/b.md", "open /ho" + "me/me/model\n"), Sample("tests/c.py", 'path = "/ro' + 'ot/model"\n')),
    ),
    Check(
        "leftovers",
        "nothing unfinished is committed",
        leftovers,
        (Sample("src/headrace/a.py", "# nothing left to do\n"),),
        (Sample("src/headrace/a.py", "# TO" + "DO: later\n"),),
    ),
)


def project_files() -> list[Path]:
    """Return the text files that are checked, sorted; never an empty list.

    Raises:
        SystemExit: if there is nothing to check, which means a wrong directory.
    """
    files = [ROOT / name for name in TOP_FILES if (ROOT / name).is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in SUFFIXES]
    files = [
        path for path in files if not any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
    ]
    if not any(path.suffix == ".py" for path in files):
        sys.exit(f"check_words: no Python files under {ROOT}")
    return sorted(files)


def read_text(path: Path) -> str:
    """Return a file's text; a file that is not UTF-8 is a fault of its own."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        sys.exit(f"check_words: {path.relative_to(ROOT)} is not UTF-8: {error}")


def parse_fault(text: str) -> str:
    """Return why a Python text does not parse, or an empty text."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return str(error)
    return ""


def run_checks(files: list[Path]) -> int:
    """Print every finding; return how many there are."""
    found = 0
    for path in files:
        name, text = path.relative_to(ROOT).as_posix(), read_text(path)
        if path.suffix == ".py" and (fault := parse_fault(text)):
            found += 1
            print(f"{name}: does not parse: {fault}")
            continue
        for check in CHECKS:
            for line, what in check.find(name, text):
                found += 1
                print(f"{name}:{line}: [{check.name}] {what} ({check.why})")
    return found


def self_test() -> list[str]:
    """Return what is wrong with the checks themselves: an empty list is a pass."""
    faults = []
    for check in CHECKS:
        for sample in check.good:
            faults += [
                f"{check.name} fires on its good sample {sample.path}: {what}"
                for _, what in check.find(sample.path, sample.text)
            ]
        for sample in check.bad:
            if not list(check.find(sample.path, sample.text)):
                faults.append(f"{check.name} misses its bad sample {sample.path}")
    sizes = list(
        function_sizes("def a():\n    x = 1\n    return x\n\nclass B:\n    async def c(self):\n        pass\n")
    )
    if sizes != [("a", 1, 3), ("c", 6, 2)]:
        faults.append(f"function sizes are wrong: {sizes}")
    return faults


def function_sizes(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, lines) of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def report_sizes(files: list[Path]) -> None:
    """Print lines per room, and each file and function above the length at which a reviewer asks why."""
    rooms: dict[str, list[int]] = {}
    asks: list[str] = []
    over_guide = [0, 0]
    for path in files:
        text, name = read_text(path), path.relative_to(ROOT).as_posix()
        if path.suffix != ".py" or not name.startswith("src/") or parse_fault(text):
            continue
        lines = text.count("\n")
        rooms.setdefault(name.removeprefix("src/headrace/").partition("/")[0], []).append(lines)
        over_guide[0] += lines > FILE_GUIDE_LINES
        if lines > FILE_ASK_LINES:
            asks.append(f"  {name}: {lines} lines")
        for function, first, length in function_sizes(text):
            over_guide[1] += length > FUNCTION_GUIDE_LINES
            if length > FUNCTION_ASK_LINES:
                asks.append(f"  {name}:{first} {function}: {length} lines")
    for room, sizes in sorted(rooms.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(sizes):7d} lines {len(sizes):3d} files  {room}")
    print(f"{sum(map(sum, rooms.values())):7d} lines in all")
    print(
        f"over the guides ({FILE_GUIDE_LINES}, {FUNCTION_GUIDE_LINES}): "
        f"{over_guide[0]} files, {over_guide[1]} functions"
    )
    asked = f"{FILE_ASK_LINES} and {FUNCTION_ASK_LINES}"
    print(f"above {asked} lines, where a reviewer asks why: {len(asks)}")
    print("\n".join(sorted(asks)))


def main() -> int:
    """Run the self-test always, then the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--self-test", action="store_true", help="test the checks only")
    parser.add_argument("--sizes", action="store_true", help="also print the size report")
    args = parser.parse_args()
    faults = self_test()
    for fault in faults:
        print(f"self-test: {fault}")
    if faults or args.self_test:
        print(f"check_words: {len(CHECKS)} checks, {len(faults)} faults in the checks themselves")
        return 1 if faults else 0
    files = project_files()
    found = run_checks(files)
    if args.sizes:
        report_sizes(files)
    print(f"check_words: {len(files)} files, {len(CHECKS)} checks, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

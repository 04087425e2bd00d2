"""Mutants made mechanically from the syntax tree of a module: one small change each, in the text of the file.

What only explains or guards is left alone: annotations, docstrings, ``__slots__``, ``raise`` with its message, calls of
``invariant`` and ``strict=`` of ``zip`` (checks that no correct run ever fails; a change there shows nothing about the
code). Must not run anything.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARE: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_COMPARE_TEXT: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_BINARY: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
_SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list", "popleft": "pop"}
_ARID_CALLS = frozenset({"invariant"})


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path of the module below ``src``, with slashes.
        scope: dotted name of the function or class around it, "" at the top.
        operator: kind of the change.
        start: index of the first character that is replaced.
        end: index behind the last one.
        replacement: what stands there instead.
        line: number of the line where the change begins.
        fingerprint: stays the same when other lines of the file move.
    """

    file: str
    scope: str
    operator: str
    start: int
    end: int
    replacement: str
    line: int
    fingerprint: str = ""

    def apply(self, text: str) -> str:
        """Return the text of the file with the change."""
        return text[: self.start] + self.replacement + text[self.end :]

    def diff(self, text: str) -> str:
        """Return the change for people."""
        return diff_of(self.file, text, self.apply(text))


def diff_of(file: str, old: str, new: str) -> str:
    """Return a unified diff of two texts of a file, with one line around each change."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), file, file, lineterm="", n=1)
    return "\n".join(lines)


class _Finder(ast.NodeVisitor):
    """Walks a module and notes changes."""

    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self._text = text
        # Columns of the syntax tree count bytes of UTF-8; we count characters.
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[str] = []
        self._returns: list[ast.expr | None] = []
        self.found: list[Mutant] = []

    # Places and pieces of text.

    def _at(self, line: int, column_bytes: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column_bytes].decode())

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _source(self, node: ast.expr | ast.stmt) -> str:
        return self._text[self._start(node) : self._end(node)]

    def _note(self, operator: str, start: int, end: int, replacement: str) -> None:
        line = self._text.count("\n", 0, start) + 1
        self.found.append(Mutant(self._file, ".".join(self._scope), operator, start, end, replacement, line))

    def _replace(self, operator: str, node: ast.expr | ast.stmt, replacement: str) -> None:
        self._note(operator, self._start(node), self._end(node), replacement)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str, operator: str) -> None:
        """Change an operator that stands between two operands, maybe with brackets around it."""
        low, high = self._end(left), self._start(right)
        gap = self._text[low:high]
        place = gap.find(old)
        if place >= 0:
            self._note(operator, low + place, low + place + len(old), new)

    # What is left alone.

    def _body(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        return

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_Import(self, node: ast.Import) -> None:
        return

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scope.append(node.name)
        self._returns.append(node.returns)
        for default in [*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None)]:
            self.visit(default)
        self._body(_without_docstring(node.body))
        self._returns.pop()
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._body(_without_docstring(node.body))
        self._scope.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self._body(_without_docstring(node.body))

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if _called_name(node.value) in _ARID_CALLS:
            return
        self._replace("drop statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if "__slots__" in names or "__all__" in names:
            return
        # Without its first assignment a local name does not exist: that shows nothing.
        if not names and not any(isinstance(target, ast.Tuple) for target in node.targets):
            self._replace("drop statement", node, "pass")
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.visit(target.slice)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("drop statement", node, "pass")
        swap = _BINARY.get(type(node.op))
        if swap:
            self._between(node.target, node.value, swap[0] + "=", swap[1] + "=", "swap operator")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace("drop statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("drop jump", node, "pass")
        self._replace("swap jump", node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("drop jump", node, "pass")
        self._replace("swap jump", node, "continue")

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not all(isinstance(item, ast.Raise) for item in node.body) or node.orelse:
            self._negate(node.test)
            self.visit(node.test)
        self._body(node.body)
        self._body(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        value, annotation = node.value, self._returns[-1] if self._returns else None
        if value is None:
            self._replace("drop return", node, "pass")
            return
        wanted = ast.unparse(annotation) if annotation is not None else ""
        if not isinstance(value, ast.Constant):
            source = self._source(value)
            if wanted == "bool":
                self._replace("change result", value, f"not ({source})")
            elif wanted in ("int", "float"):
                self._replace("change result", value, f"({source}) + 1")
            elif wanted.startswith(("list[", "Sequence[")):
                self._replace("change result", value, "[]")
            if "None" in wanted:
                self._replace("change result", value, "None")
        self.generic_visit(node)

    # Expressions.

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Constant):
            return
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return  # dropping the "not" is the same
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and len(_COMPARE[type(test.ops[0])]) == 1:
            return  # the comparison itself is turned round
        self._replace("negate condition", test, f"not ({self._source(test)})")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.visit(node.iter)
        for test in node.ifs:
            self.visit(test)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            for new in _COMPARE[type(operator)]:
                self._between(left, right, _COMPARE_TEXT[type(operator)], new, "swap comparison")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        swap = _BINARY.get(type(node.op))
        text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not isinstance(
            getattr(node.left, "value", 0), int | float
        )
        if swap and not text:
            self._between(node.left, node.right, *swap, "swap operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, old, new, "swap and/or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            self._note("drop sign", self._start(node), self._start(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("change constant", node, str(not value))
        elif isinstance(value, int):
            self._replace("change constant", node, str(value + 1))
            if value > 0:
                self._replace("change constant", node, str(value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = _called_name(node)
        if name in _ARID_CALLS:
            return
        if name in _SWAPPED_CALLS:
            start = self._end(node.func) - len(name)
            self._note("swap call", start, start + len(name), _SWAPPED_CALLS[name])
        if name == "range" and node.args:
            self._shift(node.args[0] if len(node.args) == 1 else node.args[1], "shift bound")
        for part in [node.func, *node.args, *(item.value for item in node.keywords if item.arg != "strict")]:
            self.visit(part)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self._shift(bound, "shift bound")
        self.generic_visit(node)

    def _shift(self, bound: ast.expr, operator: str) -> None:
        source = self._source(bound)
        self._replace(operator, bound, f"({source}) + 1")
        self._replace(operator, bound, f"({source}) - 1")


def _called_name(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return body[1:]
    return body


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all mutants of a module that are still Python, each different from the original and from the others.

    Args:
        file: its path below ``src``.
        text: its content.
    """
    finder = _Finder(file, text)
    tree = ast.parse(text)
    finder.visit(tree)
    original = ast.dump(tree)
    seen = {original}
    kept: list[Mutant] = []
    for mutant in sorted(finder.found, key=lambda item: (item.start, item.end, item.operator, item.replacement)):
        try:
            changed = ast.dump(ast.parse(mutant.apply(text)))
        except SyntaxError:
            continue
        if changed not in seen:
            seen.add(changed)
            kept.append(mutant)
    return list(_with_fingerprints(kept, text))


def _with_fingerprints(mutants: Iterable[Mutant], text: str) -> Iterator[Mutant]:
    """Name each mutant by what changes where, not by line numbers; equal changes in one scope are counted."""
    times: Counter[str] = Counter()
    for mutant in mutants:
        first = text.rfind("\n", 0, mutant.start) + 1
        last = text.find("\n", mutant.end)
        last = len(text) if last < 0 else last
        old = " ".join(text[first:last].split())
        new = " ".join((text[first : mutant.start] + mutant.replacement + text[mutant.end : last]).split())
        key = "\0".join([mutant.file, mutant.scope, mutant.operator, old, new])
        digest = hashlib.blake2b(f"{key}\0{times[key]}".encode(), digest_size=6).hexdigest()
        times[key] += 1
        yield Mutant(**{**vars(mutant), "fingerprint": digest})


def mutants_in(source: Path, rooms: Iterable[str]) -> list[Mutant]:
    """Return all mutants of some rooms of the package, in the order of files and places.

    Args:
        source: the ``src`` directory.
        rooms: names of packages below ``headrace``.
    """
    found: list[Mutant] = []
    for room in rooms:
        for path in sorted((source / "headrace" / room).rglob("*.py")):
            found += mutants_of(path.relative_to(source).as_posix(), path.read_text(encoding="utf-8"))
    return found

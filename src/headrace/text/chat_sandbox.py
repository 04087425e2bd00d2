"""The Jinja environment for chat templates: Jinja's immutable sandbox, with a limit on everything that can grow.

Templates come with models and are not trusted. Every operation that can make a large value out of small ones goes
through `chat_limits`; time is bounded by `chat`, which ends the thread of a render. Must not know messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.text import chat_limits as limits

_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_REFUSED_METHODS = frozenset({"translate", "encode"})
# Arguments of these are widths or counts.
_WIDTH_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "indent", "round", "slice", "tojson", "truncate", "wordwrap"}
)
# Not offered: no chat template needs them, and they are random or make text from nothing.
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
_REMOVED_FILTERS = ("random", "urlize", "xmlattr")


class _CheckedCodeGenerator(CodeGenerator):
    """Sends ``a ~ b`` and new lists, tuples and dicts through the checks."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.checked_concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.measured(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.measured(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "store":  # the left side of an assignment
            super().visit_Tuple(node, frame)
            return
        self.write("environment.measured(")
        super().visit_Tuple(node, frame)
        self.write(")")


class _GenerationBlock(Extension):
    """Accepts ``{% generation %}`` blocks, which mark what the model wrote; they print their body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Functions, filters and white space are those of Hugging Face's chat templates."""

    code_generator_class = _CheckedCodeGenerator
    concat = staticmethod(limits.join_checked)
    measured = staticmethod(limits.measured)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControls],
            finalize=limits.measured,
            cache_size=0,
        )
        for name in _REMOVED_GLOBALS:
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.filters = {name: _checked_filter(name, function) for name, function in self.filters.items()}

    def checked_concat(self, parts: tuple[Any, ...]) -> str:
        """Return the parts as one text (the ``~`` operator)."""
        return limits.join_checked([str(limits.measured(part)) for part in parts])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator after checking how large the result would be."""
        limits.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; methods of texts that can make long results are checked first."""
        owner, name = getattr(__obj, "__self__", None), str(getattr(__obj, "__name__", ""))
        if isinstance(owner, bytes):
            raise SecurityError("bytes have no methods here")
        if isinstance(owner, str):
            args = _check_method(owner, name, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return limits.measured(result) if isinstance(result, list | tuple | dict) else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a checked stand-in for ``format`` and ``format_map`` of a text; None for other values."""
        stand_in = super().wrap_str_format(value)
        if stand_in is None:
            return None
        text, call = str(value.__self__), stand_in

        def checked(*args: Any, **kwargs: Any) -> str:
            groups = [value.values() if isinstance(value, dict) else [value] for value in (*args, *kwargs.values())]
            limits.check_braces(text, *(item for group in groups for item in group))
            return call(*args, **kwargs)

        return checked


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if name in _REFUSED_METHODS:
        raise SecurityError(f"the method {name} is not offered")
    if name in _WIDTH_METHODS:
        limits.check_widths([*args, *kwargs.values()])
        limits.check_characters(
            len(owner) * (limits.MAX_WIDTH if name == "expandtabs" and args and "\t" in owner else 1)
        )
    elif name == "replace" and len(args) >= 2:
        limits.check_replace(owner, *args)
    elif name == "join" and args:
        return (limits.check_join(args[0], owner), *args[1:])
    return args


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks what goes in and what comes out."""
    context_argument = getattr(function, "jinja_pass_arg", None)
    first = 0 if context_argument is None else 1

    def checked(*args: Any, **kwargs: Any) -> Any:
        own, rest = args[:first], args[first:]
        result = function(*own, *_check_filter(name, rest, kwargs), **kwargs)
        return limits.measured(result) if isinstance(result, str | list | tuple | dict) else result

    if context_argument is not None:
        checked.jinja_pass_arg = context_argument  # type: ignore[attr-defined]
    return checked


def _check_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    value, options = (args[0] if args else None), [*args[1:], *kwargs.values()]
    limits.measured(value)
    for option in options:
        limits.measured(option)
    if name in _WIDTH_FILTERS:
        limits.check_widths(options)
        if name == "indent" and isinstance(value, str):
            width = next(
                (len(item) if isinstance(item, str) else int(item) for item in options if not isinstance(item, bool)), 4
            )
            limits.check_characters(len(value) + (value.count("\n") + 1) * width)
    elif name == "join":
        separator = str(kwargs.get("d", args[1] if len(args) > 1 else ""))
        return (limits.check_join(value, separator), *args[1:])
    elif name == "replace":
        limits.check_replace(*args, *kwargs.values())
    elif name == "format":
        limits.check_percent(*args, **kwargs)
    elif name == "sum" and any(isinstance(option, list | tuple) for option in options):
        raise SecurityError("sum adds numbers only")
    return args


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(limits.measured(message)))


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise SecurityError("a date format of more than 1000 characters")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without HTML escapes, as Hugging Face does."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    pieces, characters = [], 0  # indentation can make a small value long, so the text is counted while it grows
    for piece in encoder.iterencode(value):
        characters += len(piece)
        if characters > limits.MAX_TEXT_CHARS:
            break
        pieces.append(piece)
    limits.check_characters(characters)
    return limits.join_checked(pieces)

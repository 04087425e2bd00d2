"""The one mapping of errors into OpenAI's envelope ``{"error": {"message", "type", "param", "code"}}``.

Every answer that is not a success is made here. Must not decide what is an error: that is done where it is found.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import (
    HeadraceError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
    UnknownFieldError,
)
from headrace.base.log import get_logger

_log = get_logger(__name__)
_SHOWN_CHARS = 60
_PATH_CHARS = 200

_EXPECTED: dict[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}


def envelope(error: HeadraceError) -> dict[str, Any]:
    """Return the JSON document of an error."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: HeadraceError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP answer of an error.

    ``x-should-retry`` is read by OpenAI's clients, which otherwise repeat every request that got a 5xx.
    """
    extra = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        extra["retry-after"] = "1"
    if error.http_status == 401:
        extra["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(envelope(error)),
        status_code=error.http_status,
        media_type="application/json",
        headers={**extra, **(headers or {})},
    )


def internal_error(error: BaseException) -> HeadraceError:
    """Wrap a fault of our own: its text stays in the log and does not reach the client."""
    _log.error("unexpected %s while serving a request", type(error).__name__, exc_info=error)
    return HeadraceError("internal error; the server's log has the cause")


def field_path(location: Iterable[int | str]) -> str:
    """Write a pydantic location as ``messages[0].content``; names of union members (``<text>``) are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def from_validation(error: ValidationError) -> RequestError:
    """Turn the first fault that pydantic found into a typed error with the field's name and what was expected."""
    first = error.errors(include_url=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    path = field_path(first["loc"])
    if kind == "unknown_field":
        name = f"{path}.{context['field']}" if path else str(context["field"])
        return UnknownFieldError(f"unknown field '{name}'{context['hint']}", param=name)
    if kind == "missing":
        return RequestError(f"'{path}' is required", param=path)
    expected = _expected(kind, context, first["msg"])
    shown = _shown(first["input"])
    if not path:
        return RequestError(f"the body must be {expected}, got {shown}")
    return RequestError(f"'{path}' must be {expected}, got {shown}", param=path)


def _expected(kind: str, context: Mapping[str, Any], message: str) -> str:
    """Say what would have been right."""
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind == "literal_error":
        return f"one of {context['expected']}"
    limits = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "above"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "below"),
    }
    if kind in limits:
        key, words = limits[kind]
        return f"{words} {context[key]}"
    if kind in ("too_short", "string_too_short"):
        return "non-empty"
    if kind == "string_too_long":
        return f"at most {context['max_length']} characters long"
    return message


def _shown(value: Any) -> str:
    """Show a value of the request, shortened."""
    if isinstance(value, str):
        text = repr(value[:_SHOWN_CHARS])
        return f"the string {text}" + ("…" if len(value) > _SHOWN_CHARS else "")
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list" if value else "an empty list"
    # Python refuses to print integers of many thousand digits.
    return str(value)[:_SHOWN_CHARS] if not isinstance(value, int) or value.bit_length() < 200 else "a huge integer"


def from_http_exception(error: HTTPException, request: Request, known_paths: Sequence[str]) -> Response:
    """Answer an unknown URL or a wrong method."""
    path = request.url.path
    if error.status_code == 404:
        # Comparing is quadratic in the length.
        near = difflib.get_close_matches(path, known_paths, n=1, cutoff=0.5) if len(path) <= _PATH_CHARS else []
        path = path[:_PATH_CHARS]
        hint = f"did you mean {near[0]}?" if near else "see /docs"
        return error_response(NotFoundError(f"no such URL: {path}; {hint}"))
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow") or "another method"
        return error_response(
            MethodNotAllowedError(f"{request.method} is not allowed on {path}; use {allowed}"), headers=headers
        )
    wrapped = RequestError(str(error.detail))
    return Response(
        msgspec.json.encode(envelope(wrapped)), error.status_code, headers=headers, media_type="application/json"
    )

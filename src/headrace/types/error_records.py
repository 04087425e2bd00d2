"""Typed errors across a process boundary: `HeadraceError` <-> `ErrorRecord`, the one translation for cores and ranks.

Must not know sockets, pipes or who reports to whom.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.base.errors import HeadraceError
from headrace.types.outputs import ErrorRecord


def record_of(error: BaseException) -> ErrorRecord:
    """Return the wire form of an exception; one that is not ours becomes an internal error that names its type."""
    if isinstance(error, HeadraceError):
        return ErrorRecord(
            code=error.code,
            kind=error.kind,
            message=error.message,
            http_status=error.http_status,
            retryable=error.retryable,
            param=error.param,
        )
    return ErrorRecord(
        code=HeadraceError.code,
        kind=HeadraceError.kind,
        message=f"{type(error).__name__}: {error}",
        http_status=HeadraceError.http_status,
        retryable=False,
    )


def error_of(record: ErrorRecord) -> HeadraceError:
    """Return an exception of the class that has the record's code.

    A code of no known class (a core of another build) gives a `HeadraceError` that carries the record's own status.
    """
    for known in _classes():
        if known.code == record.code:
            return known(record.message, param=record.param)
    facts = {
        "code": record.code,
        "kind": record.kind,
        "http_status": record.http_status,
        "retryable": record.retryable,
    }
    unknown: type[HeadraceError] = type("ForeignError", (HeadraceError,), facts)
    return unknown(record.message, param=record.param)


def _classes(root: type[HeadraceError] = HeadraceError) -> Iterator[type[HeadraceError]]:
    yield root
    for child in root.__subclasses__():
        if child.__name__ != "ForeignError":
            yield from _classes(child)

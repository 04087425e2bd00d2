"""Who sends a request, as far as its API key tells: a tenant for quotas, and a salt against timing probes.

A cached prefix answers faster, so a client can find out by timing what others have sent. With a salt for each key no
client hits what another one cached. Both names are derived with BLAKE3 and a context of their own: neither the key nor
one of them from the other can be computed. Must not check keys; `auth` does.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from starlette.requests import Request

from headrace.config.server import ServerConfig

_TENANT = "headrace 2026-11 tenant of an API key"
_SALT = "headrace 2026-11 prefix cache salt of an API key"
_SCOPE_KEY = "headrace_caller"


@dataclass(frozen=True)
class Caller:
    """The holder of an API key.

    Attributes:
        tenant: names it towards the scheduler; says nothing about the key.
        salt_key: 32 bytes that only this server can derive.
    """

    tenant: str
    salt_key: bytes


def caller_of_key(key: str) -> Caller:
    """Return the caller that a key stands for; the same in every process."""
    data = key.encode()
    return Caller(
        tenant=blake3(data, derive_key_context=_TENANT).hexdigest(length=8),
        salt_key=blake3(data, derive_key_context=_SALT).digest(),
    )


def remember_caller(scope: MutableMapping[str, Any], caller: Caller) -> None:
    """Note in an ASGI scope whose key came with the request.

    Mutates: ``scope``.
    """
    scope[_SCOPE_KEY] = caller


def tenant_of(request: Request) -> str | None:
    """Return the tenant of a request, None on a server without keys."""
    caller = request.scope.get(_SCOPE_KEY)
    return caller.tenant if isinstance(caller, Caller) else None


def salt_of(config: ServerConfig, request: Request, cache_salt: str | None) -> str | None:
    """Return the salt of a request's prefix-cache entries.

    Args:
        config: says whether keys have salts of their own.
        request: with the caller in its scope.
        cache_salt: the request's own field; it goes on separating, within the caller's entries.
    """
    caller = request.scope.get(_SCOPE_KEY)
    if not config.salt_per_api_key or not isinstance(caller, Caller):
        return cache_salt
    own = b"none" if cache_salt is None else b"salt" + cache_salt.encode()
    return blake3(own, key=caller.salt_key).hexdigest()

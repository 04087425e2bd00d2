"""Configuration of the HTTP front end."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.option import option


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 takes a free one and prints it.", low=0, high=65535)
    uds: str | None = option(None, "Unix domain socket to listen on in place of host and port.")
    api_key: tuple[str, ...] = option(
        factory=tuple,
        help="Key that clients must send as a bearer token; may be given several times (also HEADRACE_API_KEY).",
        secret=True,
    )
    salt_per_api_key: bool = option(
        False,
        "Let no API key hit prefixes cached for another one, so that response times tell nothing about other clients.",
    )
    allowed_origins: tuple[str, ...] = option(
        factory=tuple, help="Origin allowed by CORS; may be given several times. Default: none."
    )
    max_body_bytes: int = option(8 << 20, "Largest request body.", low=1024)
    unknown_fields: str = option(
        "refuse", "Unknown request fields: refuse with 400, or ignore.", choices=("refuse", "ignore")
    )
    max_core_restarts: int = option(5, "Engine-core crashes within ten minutes before the server gives up.", low=0)
    request_timeout_s: float = option(
        0.0,
        "Longest life of a request in seconds, even if its own timeout is longer; 0: no limit.",
        low=0.0,
    )
    shutdown_timeout_s: float = option(10.0, "Seconds for running requests when the server is told to stop.", low=0.0)

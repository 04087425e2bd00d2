"""The listening socket: bind it, or say who has the address and what to do. Must not know what is served."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
from dataclasses import dataclass

from headrace.base.errors import AddressInUseError, ConfigError
from headrace.config.server import ServerConfig

_BACKLOG = 2048


@dataclass(frozen=True)
class Listener:
    """A bound socket.

    Attributes:
        socket: ready to listen.
        url: base URL for clients on this machine.
        uds: path of a Unix socket, or None.
    """

    socket: socket.socket
    url: str
    uds: str | None = None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the socket; remove its file if it has one."""
        self.socket.close()
        if self.uds is not None and os.path.exists(self.uds):
            os.unlink(self.uds)

    @property
    def name(self) -> str:
        """What a person needs to reach it: the URL, or the path of the Unix socket."""
        return self.url if self.uds is None else f"unix:{self.uds}"

    def curl(self, chat: bool, with_key: bool, takes_text: bool = True) -> str:
        """Return one line for a shell that asks the server something.

        Args:
            chat: the model has a chat template.
            with_key: clients must send a key.
            takes_text: the model has a tokenizer; without one a prompt is token ids.
        """
        parts = ["curl", "-s"]
        if self.uds is not None:
            parts.append(f"--unix-socket {shlex.quote(self.uds)}")
        parts.append(self.url + ("/v1/chat/completions" if chat else "/v1/completions"))
        parts.append("-H 'Content-Type: application/json'")
        if with_key:
            parts.append('-H "Authorization: Bearer $HEADRACE_API_KEY"')
        chat_body = '{"messages":[{"role":"user","content":"Say hello."}]}'
        plain_body = '{"prompt":"Once upon a time"}' if takes_text else '{"prompt":[1,2,3]}'
        parts.append(f"-d '{chat_body if chat else plain_body}'")
        return " ".join(parts)


def bind(config: ServerConfig) -> Listener:
    """Bind the address of the configuration.

    Returns:
        The listener; with port 0 its URL has the port that the system chose.

    Raises:
        AddressInUseError: taken or not allowed; the message says what to do.
        ConfigError: no such address.
    """
    return _bind_unix(config.uds) if config.uds is not None else _bind_tcp(config.host, config.port)


def _bind_tcp(host: str, port: int) -> Listener:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: no form of the name for the DNS
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"--host {host}: {reason or error}", param="host") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    listener.setblocking(False)
    listener.set_inheritable(False)
    chosen = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return Listener(listener, f"http://{shown}:{chosen}")


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(
            f"port {port} on {host} is in use{_owner(port)}; stop that, or take another port with --port N "
            "(--port 0 takes a free one)",
            param="port",
        )
    if error.errno == errno.EACCES:
        return AddressInUseError(
            f"not allowed to listen on port {port}; take one above 1023 with --port N", param="port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host} is not an address of this machine; use 127.0.0.1 or 0.0.0.0", param="host")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", param="port")


def _owner(port: int) -> str:
    """Say which process listens on a port, if the system tells us."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        return ""
    return ""


def _bind_unix(path: str) -> Listener:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except ConfigError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}", param="uds") from error
    listener.setblocking(False)
    return Listener(listener, "http://localhost", uds=path)


def _remove_stale(path: str) -> None:
    """Remove the file of a server that is gone. A live server, or a file that is no socket, is left alone."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path} exists and is not a socket", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise AddressInUseError(f"--uds {path} is in use by another server; stop it or take another path", param="uds")

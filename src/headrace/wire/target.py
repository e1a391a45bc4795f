"""The address of an engine: parsed and checked for what its kind requires.

unix:/path           a socket in a directory that only this user may open; the token is optional
host:port, loopback  a token
host:port, other     a token, and TLS certificates on both sides
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.core.errors import ConfigError
from headrace.machine.hosts import is_loopback
from headrace.machine.private_files import read_token
from headrace.wire.tls.files import TlsFiles, files_in, token_path

TOKEN_METADATA = "headrace-token"
MAX_UNIX_PATH_BYTES = 107
"""sun_path has 108 bytes, and the last one is a zero."""

MIN_TOKEN_CHARS = 16

LISTENS_S = 2.0
"""The kernel would try for two minutes on a network that drops packets."""


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """path: None for TCP; token: required for TCP; tls: None only for Unix sockets and loopback addresses

    tls_name  that the other end's certificate is for; empty: the address's host
    """

    address: str
    path: Path | None
    token: str | None
    tls: TlsFiles | None = None
    tls_name: str = ""

    @property
    def grpc_address(self) -> str:
        return self.address if self.path is None else unix_address(self.path)

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def unix_address(path: Path) -> str:
    """gRPC reads it as a URL: `#`, `?`, `%` and spaces of the path are escaped."""
    return f"unix:{quote(os.fsencode(path))}"


def parse_target(address: str, token: str | None = None, tls: TlsFiles | None = None) -> GrpcTarget:
    """Opens no file. Raises ConfigError."""
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        raise ConfigError("engine token", f"{len(token)} characters are too few", f"Use at least {MIN_TOKEN_CHARS} random ones.")
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if not path.is_absolute():
            raise ConfigError("engine address", f"{address!r} is not an absolute socket path", "Write unix:/run/dir/name.sock.")
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                "engine address", f"the socket path has more than {MAX_UNIX_PATH_BYTES} bytes", "Use a shorter run directory."
            )
        if tls is not None:
            raise ConfigError("tls_dir", f"is given for {address}", "A Unix socket needs none: its directory is the lock.")
        return GrpcTarget(address, path, token)
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("engine address", f"{address!r} is neither unix:/path nor host:port")
    if not re.fullmatch(r"\[[0-9a-fA-F:.]+(%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+", host):
        raise ConfigError("engine address", f"{host!r} is neither a host's name nor an address", "Write an IPv6 address in brackets.")
    if tls is None and not is_loopback(host):
        raise ConfigError(
            "engine address",
            f"{host!r} is not a loopback address, and no certificates are given",
            "Between machines the wire speaks TLS: `headrace tls init` makes certificates; --tls-dir or the key tls_dir names them.",
        )
    if token is None:
        remedy = "Name a file that holds it (--token-file, token_file). A Unix socket needs none."
        raise ConfigError("engine address", f"{address!r} needs a token", remedy)
    return GrpcTarget(address, None, token, tls)


def target_of(address: str, *, token: str | None, token_file: str, tls_dir: str) -> GrpcTarget:
    """tls_dir  folder with this side's certificates, and with its token where `token_file` is empty; empty: no TLS

    Raises ConfigError, also where the token's file cannot be read or is open to other users.
    """
    check_target(address, token=token, token_file=token_file, tls_dir=tls_dir)
    if token is None and (path := token_path(token_file, tls_dir)):
        token = read_token("token_file" if token_file else "tls_dir", path)
    return parse_target(address, token, files_in(tls_dir) if tls_dir else None)


def check_target(address: str, *, token: str | None, token_file: str, tls_dir: str) -> None:
    """Opens no file: the files may be on another machine. Raises ConfigError."""
    if token is not None and token_file:
        raise ConfigError("token_file", "is given beside token", "Give one of them.")
    if token is None and (token_file or tls_dir):
        token = "x" * MIN_TOKEN_CHARS
    parse_target(address, token, files_in(tls_dir) if tls_dir else None)


async def nothing_listens(target: GrpcTarget) -> bool:
    """False also after LISTENS_S."""
    if target.path is not None:
        return await _is_refused(asyncio.open_unix_connection(target.path))
    try:
        async with asyncio.timeout(LISTENS_S):
            addresses = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            return bool(addresses) and all([await _is_refused(asyncio.open_connection(*address[:2])) for *_, address in addresses])
    except (OSError, UnicodeError):  # TimeoutError is an OSError; the other is a name that is none
        return False


async def _is_refused(connecting: Awaitable[tuple[Any, asyncio.StreamWriter]]) -> bool:
    try:
        _, writer = await connecting
    except (FileNotFoundError, ConnectionRefusedError):
        return True
    except OSError:
        return False
    writer.close()
    return False


def token_matches(metadata: Iterable[tuple[str, str | bytes]], token: str | None) -> bool:
    """In constant time. token None: True, since the socket's directory is the access control"""
    if token is None:
        return True
    given = next((value for key, value in metadata if key == TOKEN_METADATA), "")
    return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), token.encode())

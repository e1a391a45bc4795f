"""Where an engine may listen: a Unix socket in a private directory, or loopback TCP with a token. Anything else is refused by name."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import stat
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.hosts import is_loopback

TOKEN_METADATA = "headrace-token"
MAX_UNIX_PATH_BYTES = 107
"""sun_path has 108 bytes, the last one is a zero."""

MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """An address gRPC understands, checked.

    address  "unix:/path" or "host:port"
    path     the socket's path, None for TCP
    token    required on TCP, honoured everywhere
    """

    address: str
    path: Path | None
    token: str | None


def parse_target(address: str, token: str | None = None) -> GrpcTarget:
    """Raises ConfigError for whatever the wire does not do: other hosts without TLS, loopback without a token, long socket paths."""
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
        return GrpcTarget(address, path, token)
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("engine address", f"{address!r} is neither unix:/path nor host:port")
    if not is_loopback(host):
        raise ConfigError(
            "engine address",
            f"{host!r} is not a loopback address and the wire has no TLS listener",
            "Use a Unix socket or 127.0.0.1, and a tunnel between machines.",
        )
    if token is None:
        raise ConfigError(
            "engine address", f"{address!r} needs a token", "Every user of this machine could connect; a Unix socket needs none."
        )
    return GrpcTarget(address, None, token)


def check_private(path: Path) -> None:
    """Raises ConfigError unless the socket's directory belongs to this user and is closed to all others."""
    info = os.stat(path.parent)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError("engine address", "the socket's directory is open to other users", "Make it yours alone (mode 0700).")


async def nothing_listens(target: GrpcTarget) -> bool:
    """Whether the socket is missing, or each of the name's addresses refuses a connection. False for every other failure."""
    if target.path is not None:
        return await _is_refused(asyncio.open_unix_connection(target.path))
    host, _, port = target.address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all([await _is_refused(asyncio.open_connection(*address[:2])) for *_, address in found])


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
    """Whether a call carries `token`; compared in constant time. No token configured: the socket's directory is the lock."""
    if token is None:
        return True
    given = next((value for key, value in metadata if key == TOKEN_METADATA), "")
    return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), token.encode())

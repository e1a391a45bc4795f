"""The address that the gateways of a deployment share: checked and reserved before any process is started.

Each gateway listens with a socket of its own (SO_REUSEPORT), and the kernel spreads connections over them. The supervisor binds more
sockets, which never listen and so get no connection. They pick a free port where the configuration says port 0, and keep it
for this deployment while gateways restart. A port that belongs to another server is refused at once, before weights are loaded.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.errors import ConfigError
from headrace.wire.listening import bound_sockets, close_all, shown_host


def check_can_listen(host: str, port: int) -> None:
    """Raises ConfigError when the port is in use, when `host` is not an address of this machine, or when the address cannot be bound.

    Port 0, any free port, is never in use.
    """
    close_all(_bind(host, port, is_shared=False))


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Yields the port, reserved until the block ends for gateways of this user that bind it with SO_REUSEPORT. Port 0: a free port.

    Raises ConfigError where `check_can_listen` does, also for another server that listens with SO_REUSEPORT.
    """
    check_can_listen(host, port)
    reserved = _bind(host, port, is_shared=True)
    try:
        for each in reserved:
            # Otherwise a server that reuses the address could take the port while no gateway listens.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        found: int = reserved[0].getsockname()[1]
        yield found
    finally:
        close_all(reserved)


def _bind(host: str, port: int, *, is_shared: bool) -> list[socket.socket]:
    try:
        return bound_sockets(host, port, shares_port=is_shared)[0]
    except OSError as error:
        raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    if isinstance(error, socket.gaierror):
        return ConfigError("gateway.host", f"{host!r} is not an address of this machine ({error.strerror})")
    if error.errno == errno.EADDRINUSE:
        remedy = "Stop the server that listens there, or choose another port: --port 0 takes a free one."
        return ConfigError("gateway.port", f"port {port} on {host} is in use", remedy)
    return ConfigError(
        "gateway.host", f"{shown_host(host)}:{port} cannot be listened on ({error.strerror})", "Choose another --host or --port."
    )

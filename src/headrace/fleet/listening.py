"""The address that the gateways of a deployment share: checked and reserved before any process is started.

Each gateway listens with a socket of its own (SO_REUSEPORT), and the kernel spreads connections over them. The supervisor binds one more
socket, which never listens and so gets no connection. It finds the port where a free one was asked for (0), and it keeps the port for this
deployment while gateways are started again. A port that belongs to another server is refused at once, before weights are loaded.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.errors import ConfigError


def check_can_listen(host: str, port: int) -> None:
    """Raises ConfigError with the address and what to do. Port 0 takes a free one and always holds."""
    _bind(host, port, is_shared=False).close()


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """The port, kept for gateways of this user that share it until the block ends; a free one in place of 0.

    Raises: ConfigError as `check_can_listen`, also for a server that would share the port with us.
    """
    check_can_listen(host, port)
    with _bind(host, port, is_shared=True) as reserved:
        # Otherwise a server that reuses the address could take the port while no gateway listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        found: int = reserved.getsockname()[1]
        yield found


def _bind(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As the gateway does: connections of a server that has just left do not count.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _refusal(host, port, error) from error
    return bound


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    if isinstance(error, socket.gaierror):
        return ConfigError("gateway.host", f"{host!r} is not an address of this machine ({error.strerror})")
    if error.errno == errno.EADDRINUSE:
        remedy = "Stop the server that listens there, or choose another port: --port 0 takes a free one."
        return ConfigError("gateway.port", f"port {port} on {host} is in use", remedy)
    return ConfigError("gateway.host", f"{host}:{port} cannot be listened on ({error.strerror})", "Choose another --host or --port.")

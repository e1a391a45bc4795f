"""Checks before anything is started that the gateway can listen on its address.

The gateway finds out itself, but only after its tokenizers are loaded, and the fleet would start it again, since the address may become
free. At the start of a deployment a taken port belongs to another server, and the refusal should come at once.
"""

from __future__ import annotations

import errno
import socket

from headrace.core.errors import ConfigError


def check_can_listen(host: str, port: int) -> None:
    """Raises ConfigError with the address and what to do. Port 0 takes a free one and always holds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the gateway does: connections of a server that has just left do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror as error:
        raise ConfigError("gateway.host", f"{host!r} is not an address of this machine ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "Stop the server that listens there, or choose another port: --port 0 takes a free one."
            raise ConfigError("gateway.port", f"port {port} on {host} is in use", remedy) from error
        raise ConfigError(
            "gateway.host", f"{host}:{port} cannot be listened on ({error.strerror})", "Choose another --host or --port."
        ) from error

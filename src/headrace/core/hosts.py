"""Which host names mean this machine alone."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`: `localhost` or a loopback address, IPv6 in brackets or without."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

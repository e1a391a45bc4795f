"""Binds the sockets of a listener: one for each address that its host stands for, all at one port.

    ::          every address of this machine, of both families: `::` and 0.0.0.0, so that an IPv4 client is seen by its IPv4 address
    localhost   127.0.0.1 and ::1, whatever a resolver says: `machine.hosts` takes the name for loopback
    any other   the address, in brackets or not, also with a zone (`fe80::1%eth0`); or the addresses of the name

An address that this machine does not have is left out where the host has another one: many machines have no IPv6.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from headrace.core.clock import Clock

log = logging.getLogger(__name__)

NUM_TRIES = 16
"""Where the system chooses a port: further addresses may have it in use."""

REPEAT_S = 60.0

MAX_REFUSALS = 1024

MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listening_sockets(host: str, port: int, *, backlog: int, shares_port: bool = False) -> list[socket.socket]:
    sockets, missing = bound_sockets(host, port, shares_port=shares_port)
    try:
        for each in sockets:
            each.listen(backlog)
    except OSError:
        close_all(sockets)
        raise
    if missing:
        log.warning("this machine does not have %s: %s is %s here", ", ".join(missing), host, ", ".join(map(shown_address, sockets)))
    return sockets


def bound_sockets(host: str, port: int, *, shares_port: bool = False) -> tuple[list[socket.socket], list[str]]:
    """(a socket for each address, the addresses that this machine does not have).

    Raises OSError, for a name without an address socket.gaierror.
    """
    addresses = _addresses(host, port)
    for left in reversed(range(NUM_TRIES)):
        try:
            return _bind_all(addresses, port, shares_port)
        except OSError as error:
            if port or not left or error.errno != errno.EADDRINUSE:
                raise
    raise AssertionError


def close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def shown_address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"{shown_host(host)}:{port}"


def shown_host(host: str) -> str:
    """As in a URL: an IPv6 address has brackets, and its zone a percent sign that is escaped."""
    bare = host.strip("[]")
    return f"[{bare.replace('%', '%25')}]" if ":" in bare else bare


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    bare = host.strip("[]")
    names = [bare]
    if bare.lower() == "localhost":
        names = ["127.0.0.1", "::1"]
    elif _is_any_ipv6(bare):
        names = ["::", "0.0.0.0"]
    addresses = []
    for name in names:
        try:
            given = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (UnicodeError, ValueError):  # a name that cannot be written in DNS
            raise socket.gaierror(socket.EAI_NONAME, "it is not a host's name") from None
        addresses += [(int(family), address) for family, *_, address in given]
    return list(dict.fromkeys(addresses))


def _is_any_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).is_unspecified
    except ValueError:
        return False


def _bind_all(addresses: Sequence[tuple[int, Any]], port: int, shares_port: bool) -> tuple[list[socket.socket], list[str]]:
    sockets: list[socket.socket] = []
    missing: dict[str, OSError] = {}
    with ExitStack() as on_error:
        for family, address in addresses:
            try:
                bound = _bind(family, (address[0], port, *address[2:]), shares_port)
            except OSError as error:
                if error.errno not in MISSING:
                    raise
                missing[address[0]] = error
                continue
            on_error.callback(bound.close)
            sockets.append(bound)
            port = bound.getsockname()[1]
        if not sockets:
            raise next(iter(missing.values()))
        on_error.pop_all()
    return sockets, list(missing)


def _bind(family: int, address: Any, shares_port: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a server that has just left do not count.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class RefusalLog:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s: dict[tuple[str, str], float] = {}

    def __call__(self, host: str, reason: str) -> None:
        now = self._clock()
        if now < self._due_s.get((host, reason), now):
            return
        if len(self._due_s) >= MAX_REFUSALS:
            self._due_s.clear()
        self._due_s[host, reason] = now + REPEAT_S
        log.warning("refused a connection from %s: %s", host, reason)

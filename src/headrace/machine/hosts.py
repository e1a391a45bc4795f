"""Classifies hosts for security checks: loopback hosts, and link-local addresses and cloud metadata services (169.254.169.254, ...).

Listeners accept loopback hosts without TLS. Clients of URLs that a configuration names refuse link-local hosts (SSRF).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_EMBEDDING = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""IPv6 networks whose addresses end in an IPv4 address, to which a translator connects: NAT64, and the deprecated form `::a.b.c.d`."""

_METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")))
"""Not link-local: Alibaba, Azure, Oracle, and AWS over IPv6."""


def is_loopback(host: str) -> bool:
    """`localhost` or a loopback address, IPv6 in brackets or without."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_link_local(host: str) -> bool:
    """169.254.0.0/16, fe80::/10, or a cloud's metadata service; an IPv4 address inside an IPv6 address counts too.

    False for a host name: check the addresses that the name resolves to.
    """
    address = _address(host)
    meant = {address, *_embedded(address)} if isinstance(address, ipaddress.IPv6Address) else {address}
    return any(each is not None and (each.is_link_local or each in _METADATA) for each in meant)


def _embedded(address: ipaddress.IPv6Address) -> Iterator[IPAddress | None]:
    yield address.ipv4_mapped
    yield address.sixtofour
    yield from address.teredo or ()
    if any(address in network for network in _EMBEDDING):
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _address(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None

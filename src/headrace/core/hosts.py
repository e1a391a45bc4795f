"""Which host names mean this machine alone, and which addresses belong to the link or the cloud's own services."""

from __future__ import annotations

import ipaddress

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address, which a translator in the network connects to."""

_METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")))
"""Metadata services that are not link-local: Alibaba, Azure, Oracle, and AWS over IPv6."""


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`: `localhost` or a loopback address, IPv6 in brackets or without."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_link_local(host: str) -> bool:
    """Whether `host` is a link-local address (169.254.0.0/16, fe80::/10) or a cloud's metadata service, in any of the forms that IPv6 has
    for an IPv4 address. False for a name: what it resolves to is to be asked."""
    address = _address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or (_last_bits(address) if address in _NAT64 else address)
    return address is not None and (address.is_link_local or address in _METADATA)


def _address(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _last_bits(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)

"""The address of a client behind proxies. What a proxy says is believed from the listed ones alone; any client can write the headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from headrace.core.errors import ConfigError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_HOPS = 32
"""Addresses of a chain that are read, from its end."""

_FORWARDED_FOR = re.compile(r'(?:^|;)\s*for=("?)([^";]*)\1\s*(?:;|$)', re.IGNORECASE)


class TrustedProxies:
    def __init__(self, networks: Sequence[str]) -> None:
        """networks: as `check_networks` leaves them"""
        self._networks = [ip_network(network) for network in networks]

    def client_of(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The address of the client: of the peer, or what trusted proxies wrote down of the one before them.

        The chain is read from its end, where the nearest proxy wrote, up to the first address that is not a trusted proxy's: what stands
        before that is the client's own invention. A word that is no address ends it likewise.
        """
        nearest = _address(peer)
        if nearest is None or not self._networks:
            return peer
        for word in reversed(_chain(headers)[-MAX_HOPS:]):
            if not self._trusts(nearest) or (further := _address(word)) is None:
                break
            nearest = further
        return str(nearest)

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def check_networks(where: str, networks: Sequence[str]) -> None:
    """Raises ConfigError for what is no network in CIDR notation."""
    for index, network in enumerate(networks):
        try:
            ip_network(network)
        except ValueError as error:
            raise ConfigError(f"{where}[{index}]", f"{network!r} is no network ({error})", "Write 10.0.0.0/8, or one address.") from None


def _chain(headers: Sequence[tuple[bytes, bytes]]) -> list[str]:
    """Addresses from the client's to the nearest proxy's, of `Forwarded` where it is there, else of `X-Forwarded-For`."""
    forwarded = [part for name, value in headers if name == b"forwarded" for part in value.decode("latin-1").split(",")]
    if forwarded:
        found = [_FORWARDED_FOR.search(part.strip()) for part in forwarded]
        return [match[2] if match else "" for match in found]
    return [part for name, value in headers if name == b"x-forwarded-for" for part in value.decode("latin-1").split(",")]


def _address(word: str) -> Address | None:
    """An address, perhaps with a port, or in brackets; IPv4 in IPv6 is IPv4."""
    text = word.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found

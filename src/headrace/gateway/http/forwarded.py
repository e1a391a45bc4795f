"""The address of a client behind proxies. What a proxy says is believed from the listed ones alone; any client can write the headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import islice

from headrace.core.errors import ConfigError

Address = IPv4Address | IPv6Address

MAX_HOPS = 32
"""Addresses of a chain that are read, from its end."""


class TrustedProxies:
    def __init__(self, networks: Sequence[str]) -> None:
        """networks: as `check_networks` leaves them"""
        self._networks = [ip_network(network) for network in networks]

    def client_of(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The address of the client: of the peer, or what trusted proxies wrote down of the one before them.

        The chain is read from its end, where the nearest proxy wrote, up to the first address that is not a trusted proxy's: what stands
        before that is the client's own invention. A word that is no address ends it likewise.
        """
        if not self._networks:
            return peer
        nearest = _address(peer)
        if nearest is None:
            return peer
        words = islice(_from_the_end(headers), MAX_HOPS)
        while self._trusts(nearest) and (further := _address(next(words, ""))) is not None:
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


def _from_the_end(headers: Sequence[tuple[bytes, bytes]]) -> Iterator[str]:
    """The addresses as words, from the nearest proxy's on, of `Forwarded` where it is there, else of `X-Forwarded-For`.

    A client of any kind sends these headers. Each word is read only when it is asked for, and each byte of it a fixed number of times.
    """
    forwarded = [value for name, value in headers if name == b"forwarded"]
    if forwarded:
        yield from map(_named_for, _parts_from_the_end(forwarded))
    else:
        yield from _parts_from_the_end([value for name, value in headers if name == b"x-forwarded-for"])


def _parts_from_the_end(values: Sequence[bytes]) -> Iterator[str]:
    """What stands between commas, the last part of the last header first."""
    for value in reversed(values):
        end = len(value)
        while end >= 0:
            comma = value.rfind(b",", 0, end)
            yield value[comma + 1 : end].decode("latin-1")
            end = comma


def _named_for(part: str) -> str:
    """The value of `for` in one part of a `Forwarded` header, without its quotes; empty where it has none."""
    for pair in part.split(";"):
        name, equals, value = pair.strip().partition("=")
        if equals and name.lower() == "for":
            return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    return ""


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

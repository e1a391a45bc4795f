"""Checks the Host that a request names, and the Origin of the page that sends it.

The Host header: a page in a browser must not reach a server on loopback through a rebound DNS name. Bound to loopback, the server answers
to loopback names and listed ones; bound elsewhere, to every name, or to the listed ones alone. Probes are answered under every name.

Cross-origin requests (the Fetch standard's CORS) are off unless the operator lists origins. Then every answer to one, errors and streams
included, says that the page may read it, and a preflight is answered without a key. Credentials in the browser's sense are never allowed,
because no cookies are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import islice

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.asgi import Headers
from headrace.gateway.http.config import ANY_ORIGIN, ORIGIN
from headrace.gateway.http.errors import Forbidden
from headrace.gateway.http.exchange import Exchange
from headrace.machine.hosts import is_loopback

PREFLIGHT_AGE_S = 600

METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
"""The same for every path: a preflight has no key, so its answer does not show which paths exist."""

DEFAULT_HEADERS = b"authorization, content-type"
"""Where the preflight names none that are well-formed."""

EXPOSED = (
    b"x-request-id, x-headrace-ignored, x-headrace-context, x-headrace-cache, x-headrace-model,"
    b" x-headrace-reason, age, idempotent-replayed, retry-after,"
    b" x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests,"
    b" x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)

MAX_HEADER_NAMES = 2000

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, \t-]{1,%d}" % MAX_HEADER_NAMES)


class Origins:
    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)

    def check(self, exchange: Exchange, host: str) -> None:
        """Raises Forbidden for a page of another origin that is not allowed."""
        exchange.add_headers(*self.answer_headers(exchange.headers))
        if not exchange.has_header(b"origin"):
            return
        origins = _origins(exchange.headers)
        is_same = len(origins) == 1 and _is_same_origin(origins[0], host)
        if not is_same and not self._is_allowed(origins):
            raise Forbidden(_refusal(origins[0].lower()), rule="Requests of pages from this Origin are not answered.")

    def answer_headers(self, headers: Headers) -> Headers:
        if not self._allowed:
            return ()
        vary = (b"vary", b"Origin")  # of every answer: a cache must not give one page's to another
        origins = _origins(headers)
        if not self._is_allowed(origins):
            return (vary,)
        return (vary, (b"access-control-allow-origin", origins[0].encode("latin-1")), (b"access-control-expose-headers", EXPOSED))

    def _is_allowed(self, origins: Sequence[str]) -> bool:
        return len(origins) == 1 and (origins[0].lower() in self._allowed or ANY_ORIGIN in self._allowed)


def is_preflight(exchange: Exchange) -> bool:
    """Call `Origins.check` first."""
    is_options = exchange.scope["method"] == "OPTIONS"
    return is_options and exchange.has_header(b"origin") and exchange.has_header(b"access-control-request-method")


async def answer_preflight(exchange: Exchange) -> None:
    """The values of the allowed headers are checked in the request that follows."""
    asked = exchange.header(b"access-control-request-headers") or b""
    headers: Headers = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", asked if _HEADER_NAMES.fullmatch(asked) else DEFAULT_HEADERS),
        (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
    ]
    if exchange.header(b"access-control-request-private-network") == b"true":  # a public page, and a server on a private address
        headers = [*headers, (b"access-control-allow-private-network", b"true")]
    await exchange.reply(204, b"", headers)


def _origins(headers: Headers) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == b"origin"]


def _refusal(origin: str) -> str:
    if ORIGIN.fullmatch(origin) is None:
        return (
            "Requests of pages without an origin of their own (files, sandboxed frames) are not answered. Serve the page over http and "
            "start this server with --allowed-origins and its origin (gateway.allowed_origins)."
        )
    return (
        f"Requests of pages from {origin} are not answered. If they should be, start the server with --allowed-origins {origin} "
        f'(gateway.allowed_origins: ["{origin}"]).'
    )


def _is_same_origin(origin: str, host: str) -> bool:
    scheme, separator, rest = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and rest.lower() == host.lower()


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?")


class HostCheck:
    def __init__(self, bound_to: str, allowed_hosts: Sequence[str]) -> None:
        self._allowed: frozenset[str] | None = frozenset(name.lower() for name in allowed_hosts) or None
        if is_loopback(bound_to):
            self._allowed = LOOPBACK_NAMES | {bound_to.lower()} | (self._allowed or set())

    def __call__(self, exchange: Exchange, *, is_probe: bool) -> str:
        """Empty for an HTTP/1.0 request without a Host. is_probe: every name is allowed, since load balancers send an address or none

        Raises InvalidRequest for no, several or malformed Host headers, and Forbidden for a name that is not allowed.
        """
        value = exchange.header(b"host")
        if value is None and self._may_lack_host(exchange, is_probe=is_probe):
            return ""
        host = "" if value is None else value.decode("latin-1")
        match = _HOST.fullmatch(host)
        if match is None:
            raise InvalidRequest("Host", "exactly one well-formed Host header")
        name = match["name"].lower()
        if not is_probe and self._allowed is not None and name not in self._allowed:
            raise Forbidden(
                f"This server does not answer to the Host name {name}. If it should, start it with --allowed-hosts {name} "
                f'(gateway.allowed_hosts: ["{name}"]).',
                rule="This server does not answer to the Host name.",
            )
        return host

    def _may_lack_host(self, exchange: Exchange, *, is_probe: bool) -> bool:
        may_lack = exchange.scope.get("http_version") == "1.0" and (is_probe or self._allowed is None)
        return may_lack and not exchange.has_header(b"host")


Address = IPv4Address | IPv6Address

MAX_HOPS = 32
"""Read from the end of a chain."""


class TrustedProxies:
    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ip_network(network) for network in networks]

    def client_of(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Addresses are read from the end, where the nearest proxy wrote, up to the first that is no trusted proxy's: the client may have
        invented everything before it.
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


def _from_the_end(headers: Sequence[tuple[bytes, bytes]]) -> Iterator[str]:
    """`Forwarded`, or without it `X-Forwarded-For`. Any client can send these headers, so words are read lazily."""
    forwarded = [value for name, value in headers if name == b"forwarded"]
    if forwarded:
        yield from map(_named_for, _parts_from_the_end(forwarded))
    else:
        yield from _parts_from_the_end([value for name, value in headers if name == b"x-forwarded-for"])


def _parts_from_the_end(values: Sequence[bytes]) -> Iterator[str]:
    for value in reversed(values):
        end = len(value)
        while end >= 0:
            comma = value.rfind(b",", 0, end)
            yield value[comma + 1 : end].decode("latin-1")
            end = comma


def _named_for(part: str) -> str:
    for pair in part.split(";"):
        name, equals, value = pair.strip().partition("=")
        if equals and name.lower() == "for":
            return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    return ""


def _address(word: str) -> Address | None:
    text = word.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address

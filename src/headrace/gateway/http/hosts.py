"""The Host header: a page in a visitor's browser must not reach a server on loopback through a rebound DNS name.

Bound to loopback, the server answers to loopback names and to the names that the operator lists; bound elsewhere, to every name, or to the
listed names alone. Probes are answered under every name. The Host has no part in routing or in permissions. The Origin header is checked
by `http.origins`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.core.errors import InvalidRequest
from headrace.core.hosts import is_loopback
from headrace.gateway.http.errors import Forbidden
from headrace.gateway.http.exchange import Exchange

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?")


class HostCheck:
    def __init__(self, bound_to: str, allowed_hosts: Sequence[str]) -> None:
        self._allowed: frozenset[str] | None = frozenset(name.lower() for name in allowed_hosts) or None
        if is_loopback(bound_to):
            self._allowed = LOOPBACK_NAMES | {bound_to.lower()} | (self._allowed or set())

    def __call__(self, exchange: Exchange, *, is_probe: bool) -> str:
        """The Host of a request that may be answered; empty where an HTTP/1.0 client sent none.

        is_probe  its path is public and says nothing but how the server is. Load balancers ask such a path under an address of the
                  server or without a Host, so every name is answered there

        Raises InvalidRequest for no, several or malformed Host headers, Forbidden for one that is not answered to.
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
        """Whether a request without a Host is answered."""
        may_lack = exchange.scope.get("http_version") == "1.0" and (is_probe or self._allowed is None)
        return may_lack and not exchange.has_header(b"host")

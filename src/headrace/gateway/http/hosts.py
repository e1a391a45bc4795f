"""Host and Origin: a page in somebody's browser must not reach a server on loopback through a rebound DNS name.

Bound to loopback, only loopback names are answered; bound elsewhere, any name, unless the operator lists the allowed ones. A browser's
Origin must be the very host it talks to: there is no cross-origin use to support. Neither has a part in routing or in who may do what.
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
        if self._allowed is None and is_loopback(bound_to):
            self._allowed = LOOPBACK_NAMES | {bound_to.lower()}

    def __call__(self, exchange: Exchange) -> None:
        """Raises InvalidRequest for no, several or malformed Host headers, Forbidden for one that is not answered to."""
        hosts = [value for name, value in exchange.headers if name == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not hosts and self._allowed is None and exchange.scope.get("http_version") == "1.0":
            return  # the health checks of load balancers; HTTP/1.0 has no Host
        match = _HOST.fullmatch(host)
        if match is None:
            raise InvalidRequest("Host", "exactly one well-formed Host header")
        if self._allowed is not None and match["name"].lower() not in self._allowed:
            raise Forbidden("This server does not answer to that Host name. The operator can allow it (allowed_hosts).")
        origins = [value for name, value in exchange.headers if name == b"origin"]
        if origins and (len(origins) > 1 or not _is_same_origin(origins[0].decode("latin-1"), host)):
            raise Forbidden("Requests from other origins are not answered.")


def _is_same_origin(origin: str, host: str) -> bool:
    scheme, separator, rest = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and rest.lower() == host.lower()

"""`DELETE /cache/TENANT` on the admin socket: what `headrace cache purge` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.gateway.access.administration import Administration
from headrace.gateway.config import GatewayConfig
from headrace.gateway.control.purge import purge_all, purge_answers
from headrace.gateway.stores.store import StoreFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeBody:
    """all: sessions, and streams that could be continued, too"""

    all: bool = False


class CacheRequests:
    """A `fleet.admin.AdminRequests`."""

    def __init__(self, config: Callable[[], GatewayConfig], open_administration: Callable[[str], Administration], unix_time: Clock) -> None:
        """
        config               the one that holds now
        open_administration  for an actor; closed after each request
        """
        self._config = config
        self._open = open_administration
        self._unix_time = unix_time

    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        """Status and JSON; None: no request of these. path: its parts"""
        if method != "DELETE" or len(path) != 2 or path[0] != "cache":
            return None
        try:
            purge = purge_all if decode(PurgeBody, body).all else purge_answers
            admin = self._open(f"{actor}, through the admin socket")
            try:
                return 200, {"removed": await purge(self._config(), path[1], admin, self._unix_time)}
            finally:
                await admin.close()
        except ConfigError as error:
            return 400, {"error": str(error)}
        except StoreFailed as error:
            return 503, {"error": str(error)}

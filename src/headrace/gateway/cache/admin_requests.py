"""`DELETE /cache/TENANT` on the admin socket: what `headrace cache purge` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.gateway.cache.open import purge_answers
from headrace.gateway.config import GatewayConfig
from headrace.gateway.stores.store import StoreFailed


class CacheRequests:
    """A `fleet.admin.AdminRequests`."""

    def __init__(self, config: Callable[[], GatewayConfig], unix_time: Clock) -> None:
        """config: the one that holds now"""
        self._config = config
        self._unix_time = unix_time

    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        """Status and JSON; None: no request of these. path: its parts"""
        if method != "DELETE" or len(path) != 2 or path[0] != "cache":
            return None
        try:
            return 200, {"removed": await purge_answers(self._config(), path[1], self._unix_time)}
        except ConfigError as error:
            return 400, {"error": str(error)}
        except StoreFailed as error:
            return 503, {"error": str(error)}

"""The file that all gateways of a deployment read, changed while they run: all of them follow it, or it stays as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError
from headrace.fleet.files import write_gateway_file
from headrace.fleet.gateways import GatewayGroup
from headrace.wire.leash import ReloadRefused

REFUSED = "Its engine refused its configuration or weights."
DIED = "Its engine ended before it served."
NO_REPLICA = "It has no replica now."


class GatewayFile:
    """path: what gateways are started with"""

    def __init__(self, folder: Path, gateways: GatewayGroup, content: Mapping[str, object]) -> None:
        """Writes the first content, before any gateway runs. Raises ConfigError where it cannot."""
        self._folder = folder
        self._gateways = gateways
        self._content = content
        self.path = write_gateway_file(content, folder)

    async def offer(self, content: Mapping[str, object]) -> None:
        """Have every gateway follow this content, if it is another one.

        Raises: ReloadRefused with a gateway's reason, and ConfigError where it cannot be written; the one before holds again then.
        """
        if content == self._content:
            return
        write_gateway_file(content, self._folder)
        try:
            await self._gateways.reload()
        except ReloadRefused:
            write_gateway_file(self._content, self._folder)
            await self._gateways.reload()
            raise
        self._content = content


def why_unavailable(failures: Iterable[HeadraceError]) -> str:
    """Why a model has no replica that gateways may ask, in words that clients may read: no path, nothing of a configuration.

    failures  of its replicas
    """
    kinds = [isinstance(failure, ConfigError) for failure in failures]
    if not kinds:
        return NO_REPLICA
    return REFUSED if any(kinds) else DIED

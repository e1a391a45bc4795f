"""Changes the configuration file that all gateways of a deployment read. Either all running gateways follow the change, or the file is
restored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError
from headrace.fleet.files import write_gateway_file
from headrace.fleet.gateways import GatewayGroup
from headrace.wire.leash import ReloadRefused

log = logging.getLogger(__name__)

REFUSED = "Its engine refused its configuration or weights."
UNREADABLE = "Its tokenizer or chat template cannot be used."
DIED = "Its engine ended before it served."
ENDS = "the deployment ends, and changes no more"
NO_REPLICA = "It has no replica now."


class TextRefused(ConfigError):
    """A replica's model has a tokenizer or chat template that no gateway can use."""


class GatewayFile:
    """The configuration file of the gateways. path: passed to gateways when they are started"""

    def __init__(self, folder: Path, gateways: GatewayGroup, content: Mapping[str, object]) -> None:
        """Write the first content, before any gateway runs. Raises ConfigError if the file cannot be written."""
        self._folder = folder
        self._gateways = gateways
        self._content = content
        self._is_final = False
        self.path = write_gateway_file(content, folder)

    async def offer(self, content: Mapping[str, object]) -> None:
        """Have every gateway follow this content, unless it is the current one.

        Raises ReloadRefused with a gateway's reason, or after `limit_drain`; ConfigError if the file cannot be written. The content before
        then stays in force.
        """
        if self._is_final:
            raise ReloadRefused(ENDS)
        if content == self._content:
            return
        write_gateway_file(content, self._folder)
        try:
            await self._gateways.reload()
        except ReloadRefused:
            if self._is_final:
                raise
            await self._restore()
            raise
        if self._is_final:
            raise ReloadRefused(ENDS)
        self._content = content

    async def _restore(self) -> None:
        """Have every gateway follow the content before. A refusal is logged: the operator hears why the change was refused."""
        try:
            write_gateway_file(self._content, self._folder)
            await self._gateways.reload()
        except (ReloadRefused, ConfigError) as error:
            log.error("not every gateway has gone back to the configuration before: %s", error)

    async def limit_drain(self, drain_s: float, notice_s: float) -> None:
        """Have every gateway give running requests `drain_s` seconds once it is asked to end. Any other content, also one being offered
        now, is refused from here on.

        Returns after `notice_s` seconds at the latest, whether a gateway hangs, loads or refuses, or the disk is full.
        """
        self._is_final = True
        timeouts = self._content["timeouts"]
        assert isinstance(timeouts, Mapping), "this program writes it"
        # Zero would mean no time at all to end a stream orderly; the gateway asks for a positive number.
        content = {**self._content, "timeouts": {**timeouts, "drain_s": max(drain_s, 0.1)}}
        try:
            write_gateway_file(content, self._folder)
            async with asyncio.timeout(notice_s):
                await self._gateways.reload()
        except TimeoutError:
            log.warning("not every gateway has read how long it may drain; it is ended when that time is over")
        except (ReloadRefused, ConfigError) as error:
            log.warning("not every gateway has read how long it may drain: %s", error)


def why_unavailable(failures: Iterable[HeadraceError]) -> str:
    """Why a model has no usable replica, in words that clients may read: no paths, nothing of the configuration.

    failures  failures of its replicas
    """
    found = [*failures]
    if any(isinstance(failure, TextRefused) for failure in found):
        return UNREADABLE
    if any(isinstance(failure, ConfigError) for failure in found):
        return REFUSED
    return DIED if found else NO_REPLICA

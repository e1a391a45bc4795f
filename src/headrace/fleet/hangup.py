"""SIGHUP of a supervisor: the configuration is read again. What the signal means otherwise: `wire.hangup`."""

from __future__ import annotations

import asyncio
import logging

from headrace.core.errors import HeadraceError
from headrace.fleet.control import FleetControl

log = logging.getLogger(__name__)


async def reload_when_asked(asked: asyncio.Event, control: FleetControl) -> None:
    """Reload each time `asked` is set, until cancelled. Signals that come during a command are one reload after it."""
    while True:
        await asked.wait()
        await control.idle()
        asked.clear()
        try:
            failures = await control.reload()
        except HeadraceError as error:
            log.error("SIGHUP changed nothing: %s", error)
        except Exception:  # the outermost loop: a bug must not end what serves
            log.exception("the reload on SIGHUP failed")
        else:
            for failure in failures:
                log.error("%s", failure)

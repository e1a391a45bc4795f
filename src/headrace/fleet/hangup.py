"""SIGHUP at the supervisor: read the configuration again (`wire.hangup` says when).

A deployment that was started with SIGHUP ignored (nohup) goes on ignoring it; `headrace reload` reaches it all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.errors import HeadraceError
from headrace.fleet.control import FleetControl
from headrace.wire.hangup import on_hangup
from headrace.wire.stop_signals import StopSignals

log = logging.getLogger(__name__)


@asynccontextmanager
async def reload_on_hangup(control: FleetControl, stop: StopSignals, *, has_file: bool) -> AsyncIterator[None]:
    """Until the block ends, SIGHUP reloads; without a file, or when the terminal is gone, it drains."""
    asked = asyncio.Event()
    reloading = asyncio.create_task(_reload_when(asked, control), name="reload on SIGHUP")
    try:
        with on_hangup(asked.set if has_file else None, stop):
            yield
    finally:
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)


async def _reload_when(asked: asyncio.Event, control: FleetControl) -> None:
    """Signals that come during a command are one reload after it."""
    while True:
        await asked.wait()
        await control.idle()
        asked.clear()
        try:
            failures = await control.reload()
        except HeadraceError as error:
            log.error("SIGHUP changed nothing: %s", error)
        else:
            for failure in failures:
                log.error("%s", failure)

"""SIGHUP of a supervisor: the configuration is read again. What the signal means otherwise: `wire.hangup`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.errors import HeadraceError
from headrace.fleet.command_slot import ControlBusy
from headrace.fleet.control import FleetControl
from headrace.fleet.progress import no_operator

log = logging.getLogger(__name__)


@asynccontextmanager
async def reloading_when_asked(asked: asyncio.Event, control: FleetControl) -> AsyncIterator[None]:
    """Reload each time `asked` is set, until the block ends. Signals that come during a command are one reload after it."""
    running: set[asyncio.Task[None]] = set()

    def begin(work: asyncio.Task[None]) -> None:
        running.add(work)
        work.add_done_callback(running.discard)

    async def listen() -> None:
        while True:
            await asked.wait()
            await control.idle()
            asked.clear()
            # A task: a reload that waits for an engine to start must not keep the next one waiting.
            begin(asyncio.create_task(_reload(control), name="reload on SIGHUP"))
            await asyncio.sleep(0)

    begin(asyncio.create_task(listen(), name="SIGHUP"))
    try:
        yield
    finally:
        ending = [*running]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


async def _reload(control: FleetControl) -> None:
    try:
        failures = await _reload_once_idle(control)
    except HeadraceError as error:
        log.error("SIGHUP changed nothing: %s", error)
    except Exception:  # the outermost loop: a bug must not end what serves
        log.exception("the reload on SIGHUP failed")
    else:
        for failure in failures:
            log.error("%s", failure)


async def _reload_once_idle(control: FleetControl) -> list[str]:
    """A command may come between the end of the one before and this reload: it is waited for as well."""
    while True:
        try:
            failures = await control.reload()
            await control.audit.record("SIGHUP", "reload", {}, no_operator, failures)
            return failures
        except ControlBusy:
            await control.idle()

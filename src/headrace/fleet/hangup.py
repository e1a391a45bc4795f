"""Reloads the supervisor's configuration when the process gets SIGHUP.

`machine.hangup` handles the signal and sets the event that this module waits for. A SIGHUP from a closed terminal drains the process
instead.
"""

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
    """Reload each time `asked` is set, until the block ends. Signals that arrive while a command runs lead to one reload after the command.

    A reload that fails is logged; nothing is raised. Reloads that run when the block ends are cancelled.
    """
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
    """Reload, and record the reload in the audit log. Returns the failures.

    Another command may start after `idle` returned and before this reload; the reload then waits for that command too. Raises a
    HeadraceError when the new configuration is refused.
    """
    while True:
        try:
            failures = await control.reload()
            await control.audit.record("SIGHUP", "reload", {}, no_operator, failures)
            return failures
        except ControlBusy:
            await control.idle()

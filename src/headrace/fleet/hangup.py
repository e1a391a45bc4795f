"""SIGHUP: read the configuration again. From a terminal that was closed it means what it always did, the end of the program.

A deployment that was started with SIGHUP ignored (nohup) goes on ignoring it; `headrace reload` reaches it all the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.errors import HeadraceError
from headrace.fleet.control import FleetControl
from headrace.wire.stop_signals import StopSignals

log = logging.getLogger(__name__)


@asynccontextmanager
async def reload_on_hangup(control: FleetControl, stop: StopSignals, *, has_file: bool) -> AsyncIterator[None]:
    """Until the block ends, SIGHUP reloads; without a file, or when the terminal is gone, it drains."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    asked = asyncio.Event()
    had_terminal = _has_terminal()

    def take() -> None:
        if has_file and _has_terminal() == had_terminal:
            asked.set()
        else:
            stop.ask("stopped by SIGHUP")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, take)
    reloading = asyncio.create_task(_reload_when(asked, control), name="reload on SIGHUP")
    try:
        yield
    finally:
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a late one must not end the process before its children have left


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


def _has_terminal() -> bool:
    """This process has a controlling terminal, which is there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

"""Requests that a running gateway reads its file again, and their answers: from a supervisor through the leash, or SIGHUP.

Reloads run one after another, in the order of asking. A status is answered at once, during a reload too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from headrace.core.errors import HeadraceError
from headrace.gateway.control.reload import Read, Reloader
from headrace.wire.hangup import on_hangup
from headrace.wire.leash import Leash, LeashRequest, LeashRequestKind
from headrace.wire.stop_signals import StopSignals

log = logging.getLogger("headrace.gateway")

INTERNAL = "the change failed by a fault of this program; its log says more"


@asynccontextmanager
async def answering(leash: Leash, reloader: Reloader, read: Read | None, stop: StopSignals) -> AsyncIterator[None]:
    """Answer requests until the block ends.

    read  reads the configuration again; None: there is no file, and SIGHUP drains
    """
    answers = _Answers(leash, reloader, read)
    loop = asyncio.get_running_loop()

    def hand_over(request: LeashRequest) -> None:  # in the leash's thread
        with suppress(RuntimeError):  # the loop is closed: this process ends
            loop.call_soon_threadsafe(answers.take, request)

    leash.listen(hand_over)
    reloading = loop.create_task(answers.run(), name="reloads")
    try:
        with on_hangup(None if read is None else answers.reload, stop):
            yield
    finally:
        leash.listen(None)
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)


class _Answers:
    """The requests that are waiting, and their answers."""

    def __init__(self, leash: Leash, reloader: Reloader, read: Read | None) -> None:
        self._leash = leash
        self._reloader = reloader
        self._read = read
        self._waiting: asyncio.Queue[LeashRequest | None] = asyncio.Queue()

    def take(self, request: LeashRequest) -> None:
        if request.kind is LeashRequestKind.STATUS:
            self._leash.status(request, self._reloader.status())
        else:
            self._waiting.put_nowait(request)

    def reload(self) -> None:
        """As asked by a signal, which gets no answer but the log."""
        self._waiting.put_nowait(None)

    async def run(self) -> None:
        while True:
            await self._answer(await self._waiting.get())

    async def _answer(self, request: LeashRequest | None) -> None:
        reason = await self._why_refused()
        if reason:
            log.error("the configuration stays as it is: %s", reason)
        if request is not None:
            if reason:
                self._leash.refused(request, reason)
            else:
                self._leash.reloaded(request)

    async def _why_refused(self) -> str:
        """Reload; why nothing was changed, or empty."""
        if self._read is None:
            return "this gateway was started without a file"
        try:
            await self._reloader.reload(self._read)
        except HeadraceError as error:
            return str(error)
        except Exception:  # the outermost loop: a bug must not leave later requests unanswered
            log.exception("reading the configuration again failed")
            return INTERNAL
        return ""

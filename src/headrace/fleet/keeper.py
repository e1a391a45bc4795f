"""Keeps one process running: starts it, starts it again when it dies, gives up when it cannot start at all.

A process that has served is started again without limit, after a pause that doubles up to MAX_PAUSE_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from signal import Signals

from headrace.core.backoff import Backoff
from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.fleet.launcher import Child, Launch
from headrace.machine.signals import first_of
from headrace.wire.leash import LeashRequests, ReloadRefused

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
"""Bound of the pause: running streams wait for the process."""

STABLE_S = 5.0
"""After this much service the next pause is FIRST_PAUSE_S again."""

MAX_START_FAILURES = 3

RELOAD_TIMEOUT_S = 60.0


Turn = Callable[[], Awaitable[None]]


class FleetFailed(HeadraceError):
    """A process cannot be kept running."""


class ProcessKeeper:
    """ready: set once a process has served for the first time; load_s: from its launch until then, of the last one"""

    def __init__(self, label: str, launch: Launch, *, start_timeout_s: float = 0.0, turn: Turn | None = None) -> None:
        """start_timeout_s: until a process that has not served is killed; 0: never. turn: waited for before each start"""
        self.label = label
        self.ready = asyncio.Event()
        self.facts: dict[str, object] = {}
        self.num_starts = 0
        self.load_s: float | None = None
        self._launch = launch
        self._turn = turn
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._start_timeout_s = start_timeout_s
        self._was_late = False

    @property
    def status(self) -> int | None:
        """The last process's exit status; negative: the signal. None while it runs."""
        return self._child.exited.result() if self._child is not None and self._child.exited.done() else None

    @property
    def was_cut(self) -> bool:
        """The last process had served and did not end cleanly."""
        child = self._child
        return child is not None and child.ready.done() and not child.ready.cancelled() and self.status != 0

    @property
    def pid(self) -> int | None:
        return next(iter(self.pids), None)

    @property
    def pids(self) -> Sequence[int]:
        """Empty while it does not run."""
        return self._child.pids if self._child is not None and not self._child.exited.done() else ()

    @property
    def is_serving(self) -> bool:
        child = self._child
        return child is not None and not child.exited.done() and child.ready.done() and not child.ready.cancelled()

    @property
    def asked(self) -> LeashRequests | None:
        return self._child.asked if self._child is not None and not self._child.exited.done() else None

    async def reload(self, timeout_s: float | None = RELOAD_TIMEOUT_S) -> str:
        """Asks the process to read its file again. Returns why it refused; empty: it has, or will when it is started again."""
        child = self._child
        if child is None or child.exited.done():
            return ""
        try:
            async with asyncio.timeout(timeout_s):
                facts = await child.asked.reload()
        except ReloadRefused as refused:
            return str(refused)
        except Unavailable:
            return ""
        except TimeoutError:
            return f"{self.label} did not answer within {timeout_s:g} s"
        if facts:
            child.ready.result().update(facts)
        return ""

    def kill(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    def restart(self) -> None:
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()

    async def keep(self) -> None:
        """Raises ConfigError or FleetFailed when trying again is useless. Leaves no process behind."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, STABLE_S)
        num_failures = 0
        while await self._has_turn():
            lived_s = await self._run_once()
            if self._stopping.is_set():
                return
            if not self.ready.is_set():
                num_failures += 1
                self._give_up_if_hopeless(num_failures)
            pause_s = backoff.pause_s(lived_s)
            log.warning("%s; starting it again in %.1f s", self._reason(), pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _has_turn(self) -> bool:
        """False: it is stopping."""
        if self._turn is not None and not self._stopping.is_set():
            waits = [asyncio.ensure_future(wait) for wait in (self._turn(), self._stopping.wait())]
            try:
                await first_of(*waits)
            finally:
                for wait in waits:
                    wait.cancel()
        return not self._stopping.is_set()

    async def _run_once(self) -> float:
        """Returns the seconds that the process served."""
        loop = asyncio.get_running_loop()
        self.num_starts += 1
        launched_at = loop.time()
        try:
            self._child = child = await self._launch()
        except OSError as error:
            raise FleetFailed(f"{self.label} cannot be started: {error}") from error
        try:
            if self._stopping.is_set():
                child.terminate()
            await first_of(child.ready, child.exited, timeout_s=self._start_timeout_s or None)
            self._was_late = not child.ready.done() and not child.exited.done()
            if self._was_late:
                child.kill()
            since = loop.time()
            if child.ready.done() and not child.ready.cancelled():
                self.facts, self.load_s = child.ready.result(), since - launched_at
                self.ready.set()
            await asyncio.shield(child.exited)
            return loop.time() - since
        finally:
            if not child.exited.done():
                child.kill()
                await child.exited

    def _give_up_if_hopeless(self, num_failures: int) -> None:
        assert self._child is not None, "it has ended"
        failure = self._child.failure
        if failure is not None and not failure.can_retry:
            raise ConfigError(self._child.label, failure.reason.rstrip("."))
        if self._was_late:
            raise FleetFailed(f"{self._reason()} (start_timeout_s)")
        if num_failures >= MAX_START_FAILURES:
            raise FleetFailed(f"{self._reason()}; it was started {num_failures} times and never served.")

    def _reason(self) -> str:
        assert self._child is not None, "it has ended"
        label, failure, status = self._child.label, self._child.failure, self._child.exited.result()
        if self._was_late:
            return f"{self.label} did not serve within {self._start_timeout_s:g} s and was killed"
        if failure is not None:
            return f"{label} ended: {failure.reason}"
        return f"{label} was killed by {Signals(-status).name}" if status < 0 else f"{label} ended with status {status}"

"""Starts processes on this machine, each in a session of its own, on the supervisor's leash (`wire.leash`), its output labelled.

The ranks of a replica (docs/ranks.md) are one child of several processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from headrace.core.tasks import end_tasks
from headrace.machine.signals import first_of
from headrace.observe.logs import ENVIRONMENT as LOG_FORMAT
from headrace.observe.logs import LogFormat, relay
from headrace.wire.leash import LeashRequests

MAX_LINE_BYTES = 2**16
MAX_LEASH_LINE_BYTES = 2**23
"""A gateway's status has a hundred bytes per replica, an engine's answer at most 350 per adapter (`core.adapters.MAX_ADAPTERS`)."""

SECRET_VARIABLES = ("HEADRACE_API_KEY", "HEADRACE_GATEWAY__API_KEYS", "HEADRACE_SITE_KEY", "RAY_AUTH_TOKEN")
"""Prefixes of variables that children do not inherit."""
LAST_WORDS_S = 2.0

LEAVE_S = 2.0
"""Ranks of a replica have this long to end by themselves after the first that ended with status 0."""


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    can_retry: bool


class Child(Protocol):
    """label    as its words are logged; of several processes, once it has ended: that of the one for which it ended
    ready    facts reported once the child served; cancelled if it ended before
    exited   exit status (negative: the signal), set after output and leash were read to their end
    asked    what its first process is asked
    """

    ready: asyncio.Future[dict[str, object]]
    exited: asyncio.Task[int]
    asked: LeashRequests

    @property
    def label(self) -> str: ...

    @property
    def failure(self) -> Failure | None: ...

    @property
    def pids(self) -> Sequence[int]: ...

    def terminate(self) -> None: ...

    def kill(self) -> None:
        """Kills everything the child started, too."""
        ...


Launch = Callable[[], Awaitable[Child]]
"""Raises OSError when the program cannot be started."""


Say = Callable[[str, str], None]
"""Takes a line that a child printed, and the child's label."""


class ChildProcess:
    def __init__(self, label: str, process: asyncio.subprocess.Process, leash: socket.socket, say: Say) -> None:
        self.label = label
        self.failure: Failure | None = None
        self.ready: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._process = process
        self._leash = leash
        self._say = say
        self._unsent = b""
        self._writer: asyncio.StreamWriter | None = None
        self.asked = LeashRequests(self._write)
        self.exited: asyncio.Task[int] = asyncio.create_task(self._live(), name=f"child {label}")

    @property
    def pids(self) -> Sequence[int]:
        return (self._process.pid,)

    def terminate(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _live(self) -> int:
        pumps = [asyncio.create_task(self._read_leash())]
        if self._process.stdout is not None:
            pumps.append(asyncio.create_task(self._forward(self._process.stdout)))
        try:
            status = await self._process.wait()
            await asyncio.wait(pumps, timeout=LAST_WORDS_S)
            return status
        finally:
            self.kill()
            self.ready.cancel()
            self.asked.close()
            await end_tasks(pumps)

    def _write(self, data: bytes) -> None:
        if self._writer is None:
            self._unsent += data
        else:
            self._writer.write(data)

    async def _read_leash(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._leash, limit=MAX_LEASH_LINE_BYTES)
        self._writer = writer
        writer.write(self._unsent)
        try:
            async for line in reader:
                self._take(line)
        except (ConnectionError, ValueError):
            return  # it died in the middle of a line; its exit status says why
        finally:
            writer.close()

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        if message.get("event") == "ready" and not self.ready.done():
            self.ready.set_result(message)
        elif message.get("event") == "failed":
            self.failure = Failure(str(message.get("reason")), bool(message.get("can_retry")))
        else:
            self.asked.take(message)

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._log(lines)
        if rest:
            self._log([rest])

    def _log(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._say(line.decode("utf-8", "replace"), self.label)


class ChildGroup:
    """The ranks of one replica, which live and end together. The first one serves; asked to end, it ends the others."""

    def __init__(self, ranks: Sequence[Child]) -> None:
        self._ranks = ranks
        self._cause: Child | None = None
        self.ready = ranks[0].ready
        self.asked = ranks[0].asked
        self.exited = asyncio.create_task(self._live(), name=f"ranks of {ranks[0].label}")

    @property
    def label(self) -> str:
        return (self._cause or self._ranks[0]).label

    @property
    def failure(self) -> Failure | None:
        return None if self._cause is None else self._cause.failure

    @property
    def pids(self) -> Sequence[int]:
        return [pid for rank in self._ranks for pid in rank.pids]

    def terminate(self) -> None:
        self._ranks[0].terminate()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    async def _live(self) -> int:
        ended: list[Child] = []
        exits = {rank.exited: rank for rank in self._ranks}
        for exited in exits:
            exited.add_done_callback(lambda each: ended.append(exits[each]))
        try:
            await first_of(*exits)
            if not any(rank.exited.result() for rank in ended):
                await asyncio.wait(exits, timeout=LEAVE_S)
            by_themselves = [*ended]
        finally:
            await _end_all(self._ranks)
        refused = (rank for rank in self._ranks if rank.failure is not None and not rank.failure.can_retry)
        failed = (rank for rank in by_themselves if rank.exited.result())
        self._cause = cause = next(chain(refused, failed, by_themselves))
        return cause.exited.result()


async def launch_ranks(launches: Sequence[Launch]) -> Child:
    """One replica. launches: of each of its ranks"""
    ranks: list[Child] = []
    try:
        for launch in launches:
            ranks.append(await launch())
    except BaseException:
        await _end_all(ranks)
        raise
    return ChildGroup(ranks) if len(ranks) > 1 else ranks[0]


async def _end_all(children: Sequence[Child]) -> None:
    for child in children:
        child.kill()
    await asyncio.gather(*(child.exited for child in children), return_exceptions=True)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Children get secrets in a file: /proc shows a process's environment to every process of the same user."""
    return {name: value for name, value in environment.items() if not name.startswith(SECRET_VARIABLES)}


class Launcher(Protocol):
    async def launch(self, label: str, command: Sequence[str], *, forward: bool, withheld: Collection[str] = ()) -> Child: ...


class ProcessLauncher:
    def __init__(self, *, log_format: LogFormat = LogFormat.AUTO, say: Say = relay) -> None:
        """say: gets what forwarded children print"""
        # Otherwise gRPC's C core prints a line to stderr for each failed connection, beside its exceptions.
        self._environment = {"GRPC_VERBOSITY": "NONE", "PYTHONUNBUFFERED": "1", **without_secrets(os.environ)}
        self._log_format = log_format
        self._say = say

    async def launch(self, label: str, command: Sequence[str], *, forward: bool, withheld: Collection[str] = ()) -> Child:
        """Raises OSError when the program cannot be started."""
        inherited = {name: value for name, value in self._environment.items() if name not in withheld}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--parent-fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if forward else None,
                stderr=asyncio.subprocess.STDOUT if forward else None,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**inherited, LOG_FORMAT: LogFormat.JSON if forward else self._log_format},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ChildProcess(label, process, ours, self._say)

"""Plays the text host in the process of a test: it sends the messages of `text_workers.host` when a script lets it, and forks nothing.

Its workers do their jobs on the event loop, without bounds. Tests of the kind process cover what real processes add.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from os import dup
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headrace.core.errors import CheckpointError
from headrace.gateway.text_host import TextContext
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.host import Control
from headrace.text.folder import load_text


@dataclass
class HostScript:
    """What hosts do; may change at any time.

    processes      every host ever started, in that order
    ending         status with which a host ends that is started now; None: it gets ready
    is_silent      a host that is started now says nothing
    is_stopped     hosts read nothing that they are sent
    can_work       cleared: workers begin no job
    num_bad_forks  of the next ones: they fail
    """

    processes: list[ScriptedHost] = field(default_factory=list)
    ending: int | None = None
    is_silent: bool = False
    is_stopped: bool = False
    can_work: asyncio.Event = field(default_factory=asyncio.Event)
    num_bad_forks: int = 0

    def __post_init__(self) -> None:
        self.can_work.set()

    @property
    def current(self) -> ScriptedHost:
        return self.processes[-1]

    def go_on(self) -> None:
        self.is_stopped = False
        self.current.read()


class ScriptedHost:
    """What `HostProcess` uses of a process. launched_at, ended_at: on the loop's clock"""

    _pids = count(1000)

    def __init__(self, script: HostScript, command: Sequence[str], stdin: int, environment: Mapping[str, str]) -> None:
        self.pid = next(self._pids)
        self.command = command
        self.environment = environment
        self._script = script
        self._loop = asyncio.get_running_loop()
        self.launched_at = self.ended_at = self._loop.time()
        self._status: int | None = None
        self._control = Control(socket.socket(fileno=dup(stdin)))
        self._control.channel.setblocking(False)
        self._context: TextContext | None = None
        self._workers: dict[int, _Forked] = {}
        script.processes.append(self)
        self._loop.add_reader(self._control.channel, self.read)

    def poll(self) -> int | None:
        return self._status

    def wait(self) -> int:
        assert self._status is not None, "it runs, and would be waited for without end"
        return self._status

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def kill_workers(self) -> None:
        for number in [*self._workers]:
            self._end_worker(number, signal.SIGKILL)

    def read(self) -> None:
        if self._script.is_stopped or self._status is not None:
            self._loop.remove_reader(self._control.channel)
            return
        self._loop.add_reader(self._control.channel, self.read)
        messages = self._control.receive()
        for message in messages or ():
            if "config" in message:
                self._load(msgspec.convert(message["config"], frames.HostConfig))
            elif (number := message.get("fork")) is not None:
                self._fork(number, self._control.take_fd())
            else:
                self._end_worker(message["kill"], signal.SIGKILL)
        if messages is None:
            self._end(0)

    def _load(self, config: frames.HostConfig) -> None:
        if self._script.ending is not None:
            self._end(self._script.ending)
            return
        if self._script.is_silent:
            return
        texts = {}
        for name, folder in config.models.items():
            self._control.say({"loading": name})
            try:
                texts[name] = load_text(folder)
            except CheckpointError as error:
                refused = {"model": name, "file": error.file, "reason": error.reason, "remedy": error.remedy}
                self._control.say({"refused": refused})
        self._context = TextContext(texts)
        self._control.say({"ready": True})

    def _fork(self, number: int, fd: int) -> None:
        channel = socket.socket(fileno=fd)
        if self._script.num_bad_forks:
            self._script.num_bad_forks -= 1
            channel.close()
            self._control.say({"ended": number, "signal": 0})
            return
        assert self._context is not None
        channel.setblocking(False)
        self._workers[number] = _Forked(self._context, self._script, channel)
        self._control.say({"forked": number})

    def _end_worker(self, number: int, by: int) -> None:
        if (worker := self._workers.pop(number, None)) is not None:
            worker.close()
            self._control.say({"ended": number, "signal": int(by)})

    def _end(self, status: int) -> None:
        if self._status is None:
            self._status, self.ended_at = status, self._loop.time()
            self._loop.remove_reader(self._control.channel)
            self._control.channel.close()
            for worker in self._workers.values():
                worker.close()


class _Forked(asyncio.Protocol):
    def __init__(self, context: TextContext, script: HostScript, channel: socket.socket) -> None:
        self._context = context
        self._script = script
        self._channel = channel
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._working: asyncio.Task[None] | None = None
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._channel)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        size = frames.SIZES.size
        if len(self._data) >= size and len(self._data) == size + sum(frames.SIZES.unpack_from(self._data)):
            job, self._data = bytes(self._data), bytearray()
            self._working = asyncio.get_running_loop().create_task(self._work(job))

    async def _work(self, data: bytes) -> None:
        await self._script.can_work.wait()
        size = frames.SIZES.size
        num_head, _ = frames.SIZES.unpack_from(data)
        answer, tail = self._context.answer(data[size : size + num_head], data[size + num_head :])
        if self._transport is not None:
            self._transport.write(frames.frame(answer, tail))

    def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._channel.close()


@contextmanager
def scripted_hosts() -> Iterator[HostScript]:
    script = HostScript()

    def popen(command: Sequence[str], *, stdin: int, env: Mapping[str, str], **_: Any) -> ScriptedHost:
        return ScriptedHost(script, command, stdin, env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.gateway.text_workers.processes.subprocess", SimpleNamespace(Popen=popen, DEVNULL=None))
        yield script

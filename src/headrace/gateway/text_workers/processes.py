"""The workers as the gateway has them: a host process that forks them, and a socket to each. Single-threaded: one event loop."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import msgspec

from headrace.core.errors import CheckpointError
from headrace.gateway.text_workers import frames

log = logging.getLogger("headrace.gateway")

COMMAND = (sys.executable, "-m", "headrace.gateway.text_workers.host")
START_TIMEOUT_S = 120.0
RESTART_S = 1.0
ADD_TIMEOUT_S = 10.0
"""How long a new worker may take, and the host's restart before it: jobs that are queued meanwhile wait no longer."""

MAX_GROWTH = 32
"""Bytes of an answer per byte of its job: no honest answer comes near."""

HOST_LOST = -1
"""In the place of the signal that ended a worker: nobody knows it, its host is gone as well."""


class Worker(Protocol):
    """One worker. It does one job at a time."""

    def send(self, data: bytes) -> None:
        """Begin a job, given as a frame."""
        ...

    def kill(self) -> None:
        """End it, whatever it does; `on_end` is called."""
        ...


class Owner(Protocol):
    """Who is told what became of a worker."""

    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None: ...

    def ended(self, worker: Worker, number: int) -> None:
        """number: of the signal that ended it, 0 for none, HOST_LOST."""
        ...


class Workers(Protocol):
    """Where workers come from."""

    @property
    def reason(self) -> str:
        """Why no worker can be had now, in words a client may read; empty: there is nothing in the way."""
        ...

    async def start(self) -> None:
        """Raises CheckpointError when a model's text cannot be used."""
        ...

    async def add(self, owner: Owner) -> Worker:
        """A new worker, ready for a job. Raises OSError when there can be none now."""
        ...

    async def close(self) -> None: ...


class WorkerProcess(asyncio.Protocol):
    """A forked worker. Its owner hears of its end once its last answer was read and its host has said how it ended.

    is_known  set when the host has said that it is forked, or that it is gone
    """

    def __init__(self, owner: Owner, kill: Callable[[], None]) -> None:
        self._owner = owner
        self.kill = kill
        self.is_known = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._max_answer = 0
        self._is_lost = False
        self._signal: int | None = None

    def send(self, data: bytes) -> None:
        self._max_answer = MAX_GROWTH * len(data) + (1 << 20)
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        size = frames.SIZES.size
        if len(self._buffer) < size:
            return
        num_head, num_tail = frames.SIZES.unpack_from(self._buffer)
        if num_head + num_tail > self._max_answer:
            log.error("a text worker's answer has %d bytes: it is ended", num_head + num_tail)
            self.kill()
            self.close()
            return
        if len(self._buffer) < size + num_head + num_tail:
            return
        whole, self._buffer = memoryview(self._buffer), bytearray()
        answer = frames.read_answer(whole[size : size + num_head])
        self._owner.answered(self, answer, whole[size + num_head :])

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._is_lost = True
        self._maybe_end()

    def ended(self, number: int) -> None:
        """The host's word."""
        self._signal = number
        self.is_known.set()
        if self._transport is not None and number == HOST_LOST:
            self._transport.abort()
        self._maybe_end()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _maybe_end(self) -> None:
        if self._is_lost and self._signal is not None:
            self._owner.ended(self, self._signal)


class HostProcess:
    """The host, started again when it is lost."""

    def __init__(self, config: frames.HostConfig, command: Sequence[str] = COMMAND) -> None:
        self._config = config
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._rest = b""
        self._workers: dict[int, WorkerProcess] = {}
        self._next_number = 0
        self._restart: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()

    @property
    def reason(self) -> str:
        return "" if self._is_up.is_set() else "the process that reads prompts is being started"

    def spawn(self) -> None:
        """Begin to start the process; needs no event loop. `start` waits for it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._control = ours
        with theirs:
            self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._say({"config": msgspec.to_builtins(self._config)})

    def kill(self) -> None:
        """End the process, if there is one; needs no event loop. For who spawned it and never came to `start` or `close`."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._control is not None:
            self._control.close()
            self._control = None

    async def start(self) -> None:
        """Returns when every model's text is loaded. Raises CheckpointError when one cannot be used."""
        try:
            if self._process is None:
                self.spawn()
            assert self._control is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._wait_ready(self._control)
        except BaseException as error:
            await self._stop_process()
            if isinstance(error, TimeoutError):
                raise CheckpointError("chat_template", f"was not loaded within {START_TIMEOUT_S:g} s") from None
            raise
        asyncio.get_running_loop().add_reader(self._control, self._read)
        self._is_up.set()

    async def add(self, owner: Owner) -> Worker:
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await self._is_up.wait()
                return await self._fork(owner)
        except TimeoutError:
            raise OSError(errno.EAGAIN, self.reason or "the host process does not answer") from None

    async def close(self) -> None:
        """Ends the host and every worker, and waits for it."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.close()
        await self._stop_process()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    async def _fork(self, owner: Owner) -> Worker:
        """Have the host fork a worker. Raises OSError when it cannot."""
        number = self._next_number = self._next_number + 1
        ours, theirs = socket.socketpair()
        with theirs:
            assert self._control is not None
            socket.send_fds(self._control, [json.dumps({"fork": number}).encode() + b"\n"], [theirs.fileno()])
        worker = WorkerProcess(owner, lambda: self._say({"kill": number}))
        self._workers[number] = worker
        ours.setblocking(False)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
            await worker.is_known.wait()
        except asyncio.CancelledError:
            worker.kill()
            worker.close()
            raise
        if number not in self._workers:
            raise OSError(errno.EAGAIN, "the host process could not fork it")
        return worker

    async def _stop_process(self) -> None:
        """End the host, if there is one, and wait for it."""
        self._hang_up()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _wait_ready(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loading = ""
        while True:
            data = await loop.sock_recv(control, 1 << 16)
            if not data:
                raise await self._died(loading)
            for message in self._messages(data):
                loading = message.get("loading", loading)
                if (refused := message.get("refused")) is not None:
                    raise CheckpointError(f"{loading}/{refused['file']}", refused["reason"], refused["remedy"])
                if "ready" in message:
                    return

    async def _died(self, loading: str) -> CheckpointError:
        assert self._process is not None
        status = await asyncio.to_thread(self._process.wait)
        if status == -signal.SIGPROF:
            what = f"takes more than {self._config.start_cpu_s:g} s of CPU time to be compiled and to render a greeting"
            return CheckpointError(f"{loading}/chat_template", what)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return CheckpointError(loading or "the text of the models", f"ended the process that loads it ({how})")

    def _messages(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _read(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        for message in self._messages(data):
            if (number := message.get("forked")) is not None:
                if number in self._workers:
                    self._workers[number].is_known.set()
            elif (worker := self._workers.pop(message["ended"], None)) is not None:
                worker.ended(message["signal"])

    def _say(self, message: dict[str, object]) -> None:
        if self._control is not None:
            with suppress(OSError):  # it is gone: `_read` hears of it
                self._control.send(json.dumps(message).encode() + b"\n")

    def _lost(self) -> None:
        """The host is gone, and the kernel ends its workers with it."""
        log.error("the text workers' host process is gone; it is started again")
        self._hang_up()
        workers, self._workers = self._workers, {}
        self._restart = asyncio.get_running_loop().create_task(self._start_again())
        for worker in workers.values():
            worker.ended(HOST_LOST)

    async def _start_again(self) -> None:
        await self._stop_process()
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                await self.start()
                return
            except (CheckpointError, OSError) as error:
                log.error("the text workers' host process does not start: %s", error)

    def _hang_up(self) -> None:
        self._is_up.clear()
        self._rest = b""
        if self._control is not None:
            with suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

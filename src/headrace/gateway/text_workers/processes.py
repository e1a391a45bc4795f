"""Starts the host process that forks text workers, and holds the gateway's end of a socket to each. Used on one event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from headrace.core.backoff import Backoff
from headrace.core.clock import Clock
from headrace.core.errors import CheckpointError
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.frames import HOST_LOST, Owner, Worker
from headrace.gateway.text_workers.host_socket import HostSocket

log = logging.getLogger("headrace.gateway")

COMMAND = (sys.executable, "-m", "headrace.gateway.text_host")
START_TIMEOUT_S = 120.0
RESTART_S = 1.0
MAX_RESTART_S = 60.0
STABLE_S = 60.0
"""Pauses double from RESTART_S to MAX_RESTART_S, and begin anew after STABLE_S of service: a folder that cannot be loaded takes seconds of
CPU time at each start.
"""

ADD_TIMEOUT_S = 10.0
"""The host's restart included."""

KILL_TIMEOUT_S = 10.0
"""A host that has not ended a worker by then is stuck, and killed."""

MAX_GROWTH = 32
"""Most bytes of an answer per byte of its job, plus 1 MiB."""


class WorkerProcess(asyncio.Protocol):
    """The gateway's end of one forked text worker. `Owner.ended` is called when the worker's last answer was read and the host has reported
    its end.
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
    """The text workers' host process, started again when it is lost. failures: model -> why the last process could not load it, or was
    ended by loading it
    """

    def __init__(
        self,
        config: frames.HostConfig,
        withheld: Collection[str] = (),
        *,
        command: Sequence[str] = COMMAND,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """withheld: environment variables with keys, which the host and its workers do not inherit"""
        self._config = config
        self._command = command
        self._withheld = withheld
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(RESTART_S, MAX_RESTART_S, STABLE_S)
        self.failures: Mapping[str, CheckpointError] = {}
        self._failed: dict[str, CheckpointError] = {}  # as `failures`, of a process that may not be up yet; no later one is given them
        self._loading = ""  # the model that the process loads now
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: HostSocket | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._next_number = 0
        self._restart: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()
        self._up_since = 0.0

    @property
    def reason(self) -> str:
        return "" if self._is_up.is_set() else "the process that reads prompts is being started"

    def spawn(self) -> None:
        """Needs no event loop; `start` waits until the process is ready."""
        ours, theirs = socket.socketpair()
        inherited = {name: value for name, value in os.environ.items() if name not in self._withheld}
        with theirs:
            self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=inherited)
        models = {name: folder for name, folder in self._config.models.items() if name not in self._failed}
        self._loading = ""
        self._socket = HostSocket(ours, {"config": msgspec.to_builtins(replace(self._config, models=models))})

    def kill(self) -> None:
        """Needs no event loop. For a caller of `spawn` that never reached `start` or `close`."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._hang_up()

    async def start(self) -> None:
        await self._load_texts()
        self._come_up()

    async def _load_texts(self) -> None:
        """Raises CheckpointError if none can be started."""
        try:
            while (error := await self._why_not_ready()) is not None:
                await self._stop_process()
                if not self._loading:
                    raise error
                self._failed[self._loading] = error
        except BaseException:
            await self._stop_process()
            raise

    def _come_up(self) -> None:
        assert self._socket is not None
        self._socket.listen(self._read)
        self.failures = {**self._failed}
        self._up_since = self._clock()
        self._is_up.set()

    async def add(self, owner: Owner) -> Worker:
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await self._is_up.wait()
                return await self._fork(owner)
        except TimeoutError:
            raise OSError(errno.EAGAIN, self.reason or "the host process does not answer") from None

    async def close(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.close()
        await self._stop_process()

    # -- starting, and starting again --------------------------------------------------------------------------------------------

    async def _why_not_ready(self) -> CheckpointError | None:
        """Wait until the process has loaded its models. The error is about `_loading`."""
        if self._process is None:
            self.spawn()
        assert self._socket is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                is_ready = await self._becomes_ready(self._socket)
        except TimeoutError:
            return CheckpointError("chat_template", f"was not loaded within {START_TIMEOUT_S:g} s")
        return None if is_ready else await self._how_it_ended()

    async def _becomes_ready(self, channel: HostSocket) -> bool:
        """False: the process ended before."""
        while (messages := await channel.wait()) is not None:
            for message in messages:
                self._loading = message.get("loading", self._loading)
                if (refused := message.get("refused")) is not None:
                    self._failed[refused["model"]] = CheckpointError(refused["file"], refused["reason"], refused["remedy"])
                if "ready" in message:
                    return True
        return False

    async def _how_it_ended(self) -> CheckpointError:
        assert self._process is not None
        status = await asyncio.to_thread(self._process.wait)
        if status == -signal.SIGPROF:
            what = f"takes more than {self._config.start_cpu_s:g} s of CPU time to be compiled and to render a greeting"
            return CheckpointError("chat_template", what)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return CheckpointError("chat_template" if self._loading else "the text of the models", f"ended the process that loads it ({how})")

    def _lost(self) -> None:
        """The kernel ends the host's workers with it."""
        pause_s = self._backoff.pause_s(self._clock() - self._up_since)
        log.error("the text workers' host process is gone; it is started again in %.3g s", pause_s)
        self._hang_up()
        workers, self._workers = self._workers, {}
        self._restart = asyncio.get_running_loop().create_task(self._start_again(pause_s))
        for worker in workers.values():
            worker.ended(HOST_LOST)

    async def _start_again(self, pause_s: float) -> None:
        """Equal reasons in a row are logged once."""
        await self._stop_process()
        logged, before = "", self.failures
        while True:
            await self._sleep(pause_s)
            try:
                await self._start_with_some(before)
                break
            except (CheckpointError, OSError) as error:
                pause_s = self._backoff.pause_s(0.0)
                if str(error) != logged:
                    logged = str(error)
                    log.error(
                        "the text workers' host process does not start: %s; it is tried again, at least every %g s", error, MAX_RESTART_S
                    )
        for model in self.failures.keys() - before.keys():
            log.error("%s is not served until a reload: %s", model, self.failures[model])
        log.info("the text workers' host process runs again")

    async def _start_with_some(self, before: Mapping[str, CheckpointError]) -> None:
        """Only models that could be loaded `before` are tried. Raises CheckpointError if none can be loaded."""
        self._failed = {**before}
        await self._load_texts()
        lost = [error for model, error in self._failed.items() if model not in before]
        if lost and len(self._failed) == len(self._config.models):
            await self._stop_process()
            raise lost[0]
        self._come_up()

    async def _stop_process(self) -> None:
        self._hang_up()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _hang_up(self) -> None:
        self._is_up.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- workers -----------------------------------------------------------------------------------------------------------------

    async def _fork(self, owner: Owner) -> Worker:
        """Raises OSError when the host cannot fork it."""
        number = self._next_number = self._next_number + 1
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                assert self._socket is not None
                self._socket.say_with({"fork": number}, theirs.fileno())
        except OSError:
            ours.close()
            raise
        worker = WorkerProcess(owner, lambda: self._kill(number))
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
            worker.close()  # a host that was lost before there was a transport could not have it closed
            raise OSError(errno.EAGAIN, "the host process could not fork it")
        return worker

    def _kill(self, number: int) -> None:
        if self._socket is not None and number in self._workers:
            self._socket.say({"kill": number})
            asyncio.get_running_loop().call_later(KILL_TIMEOUT_S, self._check_killed, number)

    def _check_killed(self, number: int) -> None:
        if number in self._workers and self._process is not None:
            log.error("the text workers' host process does not end a worker: it is ended itself")
            self._process.kill()  # `_read` reports it

    def _read(self) -> None:
        assert self._socket is not None
        messages = self._socket.read()
        if messages is None:
            self._lost()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if (number := message.get("forked")) is not None:
            if number in self._workers:
                self._workers[number].is_known.set()
        elif (worker := self._workers.pop(message["ended"], None)) is not None:
            worker.ended(message["signal"])

"""Serves one gateway's stream at the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.tasks import end_tasks
from headrace.engine.server.unsent import UnsentFrames
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import check_known_fields
from headrace.wire.service import MalformedFrame
from headrace.wire.stream import SLICE_S

HELLO_TIMEOUT_S = 5.0


class StreamLost(HeadraceError):
    pass


class GatewayStream:
    """clock: bounds how long a frame's commands occupy the event loop"""

    def __init__(self, context: Any, *, on_command: Callable[[GatewayStream, pb.Command], None], clock: Clock = time.monotonic) -> None:
        self._context = context
        self._on_command = on_command
        self._clock = clock
        self._wake = asyncio.Event()
        self._is_writing = False
        self._num_sent = 0
        self._num_sent_at_beat = 0
        self._stuck_s = 0.0
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unsent = UnsentFrames()
        self.num_submits = 0
        self.last_ping = 0

    @property
    def is_flushed(self) -> bool:
        return not self._is_writing and not self.unsent.has_answers

    def wake(self) -> None:
        self._wake.set()

    def check_lease(self, beat_s: float, lease_s: float, max_units: int) -> None:
        """Called once per beat: time is counted in beats of `beat_s`, not by a clock, as a delay of this process is not the gateway's
        fault.
        """
        if self._lost.done():
            return
        is_stuck = self._is_writing and self._num_sent == self._num_sent_at_beat
        self._stuck_s = self._stuck_s + beat_s if is_stuck else 0.0
        self._num_sent_at_beat = self._num_sent
        if self._stuck_s > lease_s:
            self._lost.set_exception(StreamLost(f"lease lost: the gateway has not read for {self._stuck_s:.1f} s"))
        elif self.unsent.num_units > max_units:
            self._lost.set_exception(StreamLost(f"lease lost: {self.unsent.num_units} unread units exceed {max_units}"))

    def end(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)

    async def read_hello(self) -> pb.ClientHello:
        """Raises MalformedFrame if the first frame is no hello, StreamLost if it does not come in time."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await self._read_frame()
        except TimeoutError:
            raise StreamLost(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        if frame is None or not frame.HasField("hello"):
            raise MalformedFrame("the first frame must be a hello")
        if frame.commands:
            raise MalformedFrame("the hello comes alone")
        return frame.hello

    async def pump(self) -> None:
        """Raises StreamLost or MalformedFrame. Leaves no task behind."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            done, _ = await asyncio.wait([*tasks, self._lost], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._lost.cancel()
            await end_tasks(tasks)

    async def send(self, frame: pb.EngineFrame) -> None:
        self._is_writing = True
        await self._context.write(frame.SerializeToString())
        self._is_writing = False
        self._num_sent += 1

    async def _read(self) -> None:
        while (frame := await self._read_frame()) is not None:
            self.last_ping = max(self.last_ping, frame.ping)
            ends_s = self._clock() + SLICE_S
            for command in frame.commands:
                self._on_command(self, command)
                if self._clock() > ends_s:
                    await asyncio.sleep(0)  # heartbeats and other gateways have their turn
                    ends_s = self._clock() + SLICE_S

    async def _read_frame(self) -> pb.ClientFrame | None:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            return None
        try:
            frame = pb.ClientFrame.FromString(data)
        except DecodeError as error:
            raise MalformedFrame("a frame does not parse") from error
        check_known_fields("frame", frame)
        return frame

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (frame := self.unsent.take()) is not None:
                await self.send(frame)

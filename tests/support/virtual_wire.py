"""Runs the wire on virtual time: the real service, engine and client, and a link in memory where gRPC would be.

While a direction of the link is cut, what is sent waits, as the kernels at both ends would keep it. Tests of promises in seconds use this
wire. Tests over sockets show that gRPC carries the same frames (`wire_kit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
from patience import PATIENCE_S
from virtual_time import VirtualTimeLoop

from bench.network_faults import Direction
from headrace.engine.config import EngineConfig
from headrace.engine.server.dispatcher import AsyncioOutbox
from headrace.engine.server.service import EngineService
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.wire import headrace_pb2 as pb
from headrace.wire.client import ReplicaClient
from headrace.wire.target import parse_target

ADDRESS = "unix:/virtual/engine.sock"
WINDOW_FRAMES = 100
"""Frames that one end sends ahead of the other end's reads; a further write waits."""


class Pipe:
    """One direction of a call. may_pass: cleared while the link is cut"""

    def __init__(self, may_pass: asyncio.Event) -> None:
        self._may_pass = may_pass
        self._frames: asyncio.Queue[object] = asyncio.Queue(WINDOW_FRAMES)

    async def read(self) -> object:
        frame = await self._frames.get()
        await self._may_pass.wait()
        return frame

    async def write(self, frame: object) -> None:
        await self._frames.put(frame)

    def end(self) -> None:
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(grpc.aio.EOF)


class MemoryCall:
    """Both ends of one call of Infer.Connect: `grpc.aio`'s call for the gateway, the servicer's context for the engine (`context`)."""

    def __init__(self, link: MemoryLink) -> None:
        self._to_server, self._to_client = (Pipe(link.may_pass[direction]) for direction in (Direction.TO_SERVER, Direction.TO_CLIENT))
        self.context = MemoryContext(self._to_server, self._to_client)
        self.serving = asyncio.create_task(self._serve(link.service))

    async def _serve(self, service: EngineService) -> None:
        with suppress(grpc.aio.AbortError):
            await service._connect(None, self.context)
        await self._to_client.write(grpc.aio.EOF)

    def break_off(self) -> None:
        self.serving.cancel()
        self.context.status = (grpc.StatusCode.INTERNAL, "the connection was reset")
        self._to_client.end()

    async def read(self) -> object:
        return await self._to_client.read()

    async def write(self, frame: pb.ClientFrame) -> None:
        await self._to_server.write(frame.SerializeToString())

    async def code(self) -> grpc.StatusCode:
        return self.context.status[0]

    async def details(self) -> str:
        return self.context.status[1]


class MemoryContext:
    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.read, self.write = incoming.read, outgoing.write
        self.status = (grpc.StatusCode.OK, "")

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.status = (code, details)
        raise grpc.aio.AbortError


class MemoryLink:
    """Stands for a `wire.dial.Dialer`, and for the channels that it opens.

    may_pass  by direction
    refuses   each new connection is reset at once
    """

    metadata = ()

    def __init__(self, service: EngineService) -> None:
        self.target = parse_target(ADDRESS)
        self.service = service
        self.may_pass = {direction: asyncio.Event() for direction in Direction}
        self.calls: list[MemoryCall] = []
        self.refuses = False
        self.heal()

    def cut(self, direction: Direction) -> None:
        self.may_pass[direction].clear()

    def heal(self) -> None:
        for may_pass in self.may_pass.values():
            may_pass.set()

    def reset(self) -> None:
        """Every connection breaks, as of a host that was started anew."""
        for call in self.calls:
            call.break_off()

    def open_channel(self) -> MemoryLink:
        return self

    def stream_stream(self, _method: str, **_: object) -> Any:
        return self._call

    def _call(self, **_: object) -> MemoryCall:
        self.calls.append(MemoryCall(self))
        if self.refuses:
            self.reset()
        return self.calls[-1]

    async def close(self) -> None:
        """The end of a connection ends its call."""
        call = self.calls.pop()
        call.serving.cancel()
        await asyncio.gather(call.serving, return_exceptions=True)


class VirtualServed:
    """A fake engine and its service; `step_s` lies between two steps, and each takes what the options say."""

    def __init__(
        self, config: EngineConfig | None = None, *, step_s: float = 0.02, options: FakeOptions | None = None, **service: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        bridge = AsyncioOutbox(loop)
        self.loop = loop
        self.options = options or FakeOptions()
        self.step_s = step_s
        self.engine = fake_engine(bridge, self.options, config, clock=self.loop.time, wait=self.loop.be_late)
        self.service = EngineService(self.engine, bridge, parse_target(ADDRESS), replica="fake-0", **service)
        self.link = MemoryLink(self.service)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self.engine.turn()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._step())
            tasks.create_task(self.service._beat())

    def client(self, **client: Any) -> ReplicaClient:
        replica = ReplicaClient(ADDRESS, clock=self.loop.time, **client)
        replica._dialer = self.link  # type: ignore[assignment]
        return replica

    @property
    def is_idle(self) -> bool:
        load = self.engine.snapshot()
        return load.num_running == load.num_waiting == self.service.num_open == 0


@asynccontextmanager
async def linked_virtually(config: EngineConfig | None = None, **served: Any) -> AsyncIterator[tuple[VirtualServed, ReplicaClient]]:
    """An engine, and a client that is connected to it; the books of both are checked at the end."""
    engine = VirtualServed(config, **served)
    running = asyncio.create_task(engine.run())
    async with engine.client(name="r0") as replica:
        await replica.wait_connected(PATIENCE_S)
        yield engine, replica
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    engine.service.check()
    engine.engine.turn()
    engine.engine.scheduler.check()

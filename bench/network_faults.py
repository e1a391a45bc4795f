"""Makes the link between two processes bad, as a TCP proxy: late, lossy, slow, cut in one direction or both, reset.

For tests and storms. It knows nothing of what it carries, so that TLS passes through it. It is no packet filter: a lost packet is emulated
as the time until TCP sends it again, in order, and a cut link holds bytes back until it is healed, as the kernels at both ends would. What
differs from a real link: the handshake of TCP itself is never late or lost, since the proxy's own kernel answers it.

    async with FaultyLink("127.0.0.1", engine_port) as link:        # dial link.port instead
        link.set(LinkFault(delay_s=0.25))                           # in both directions
        link.set(CUT, Direction.TO_SERVER)                          # a partition in one of them
        link.set(HEALTHY)
        link.reset()                                                # every connection ends with RST
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

SEGMENT_BYTES = 1448
"""Payload of a full TCP segment over Ethernet: what one lost packet takes with it."""

RETRANSMIT_S = 0.2
"""Linux's shortest retransmission timeout. It doubles with each further loss of the same segment."""

READ_BYTES = 64 << 10
MAX_CHUNKS = 64
"""Chunks under way in one direction of a connection. At most MAX_CHUNKS x READ_BYTES wait here; beyond that the sender's own socket
fills."""

_RST_ON_CLOSE = struct.pack("ii", 1, 0)


class Direction(StrEnum):
    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """The faults of one direction of a link. The order of bytes is kept.

    delay_s, jitter_s  each chunk is delay_s plus up to jitter_s late
    loss               share of segments lost, in [0, 1). Each loss costs RETRANSMIT_S, doubled if the same segment is lost again
    bytes_per_s        the link's rate; None: unlimited
    is_cut             nothing passes, not even the end of a connection. Bytes sent meanwhile wait until the link heals
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float | None = None
    is_cut: bool = False

    def lateness_s(self, num_bytes: int, draw: random.Random) -> float:
        """Seconds by which a chunk of this size is late, apart from the time that the link's rate takes."""
        lost_s = 0.0
        if self.loss:
            lost_s = max(self._retransmitted_s(draw) for _ in range(0, num_bytes, SEGMENT_BYTES))
        return self.delay_s + draw.uniform(0.0, self.jitter_s) + lost_s

    def _retransmitted_s(self, draw: random.Random) -> float:
        waited_s, timeout_s = 0.0, RETRANSMIT_S
        while draw.random() < self.loss:
            waited_s += timeout_s
            timeout_s *= 2
        return waited_s


HEALTHY = LinkFault()
CUT = LinkFault(is_cut=True)


class FaultyLink:
    """Listens on a loopback port and passes each connection on to host:port.

    refuses       reset each new connection at once, as a host does where no process listens
    num_accepted  connections that clients have made, refused ones included
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._host, self._port = host, port
        self._draw = random.Random(seed)
        self._faults = dict.fromkeys(Direction, HEALTHY)
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.refuses = False
        self.num_accepted = 0
        self.port = 0
        """Where it listens, once entered."""

    async def __aenter__(self) -> FaultyLink:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def set(self, fault: LinkFault, *directions: Direction) -> None:
        """Set the faults of these directions; without any, of both. Bytes under way keep the delay that they got."""
        for direction in directions or Direction:
            self._faults[direction] = fault
        self._changed.set()
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """End every connection with RST at both ends, as a restarted host does. Bytes under way are lost."""
        for connection in self._connections:
            connection.cancel()

    async def healed(self, direction: Direction) -> None:
        """Wait until bytes may pass in this direction."""
        while self._faults[direction].is_cut:
            await self._changed.wait()

    def fault(self, direction: Direction) -> LinkFault:
        return self._faults[direction]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.num_accepted += 1
        try:
            if not self.refuses:
                with suppress(OSError, asyncio.CancelledError):
                    await self._carry(reader, writer)
        finally:
            self._connections.discard(task)
            _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until both directions have ended. A connection broken at one end is broken at the other too."""
        for direction in Direction:
            await self.healed(direction)
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        pipes = (
            Pipe(self, Direction.TO_SERVER, reader, server_writer, self._draw),
            Pipe(self, Direction.TO_CLIENT, server_reader, writer, self._draw),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for pipe in pipes:
                    tasks.create_task(pipe.run())
            for ended in (writer, server_writer):
                ended.close()  # in order, not by RST
                await ended.wait_closed()
        except* OSError:
            pass
        finally:
            _reset(server_writer)


class Pipe:
    """One direction of one connection."""

    def __init__(
        self, link: FaultyLink, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: random.Random
    ) -> None:
        self._link, self._direction, self._draw = link, direction, draw
        self._reader, self._writer = reader, writer
        self._chunks: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(MAX_CHUNKS)
        self._clock = asyncio.get_running_loop().time
        self._sent_at = 0.0

    async def run(self) -> None:
        """Pass bytes on until the sender's end of stream was passed on. Raises OSError for a broken connection, as late as bytes arrive."""
        reading = asyncio.create_task(self._read())
        try:
            await self._write()
        finally:
            reading.cancel()

    async def _read(self) -> None:
        while True:
            try:
                data: bytes | OSError = await self._reader.read(READ_BYTES)
            except OSError as error:
                data = error
            size = 0 if isinstance(data, OSError) else len(data)
            await self._chunks.put((self._arrival(size), data))
            if not size:
                return

    def _arrival(self, num_bytes: int) -> float:
        """When a chunk sent now arrives, in seconds of the loop's clock."""
        fault = self._link.fault(self._direction)
        begins_at = max(self._clock(), self._sent_at)
        self._sent_at = begins_at + (num_bytes / fault.bytes_per_s if fault.bytes_per_s else 0.0)
        return self._sent_at + fault.lateness_s(num_bytes, self._draw)

    async def _write(self) -> None:
        arrived_at = 0.0
        while True:
            due_at, data = await self._chunks.get()
            arrived_at = max(arrived_at, due_at)
            if (left_s := arrived_at - self._clock()) > 0:
                await asyncio.sleep(left_s)
            await self._link.healed(self._direction)
            if isinstance(data, OSError):
                raise data
            if not data:
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                return
            self._writer.write(data)
            await self._writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once. If the connection still stands, its peer gets an RST."""
    connection = writer.transport.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
    writer.transport.abort()

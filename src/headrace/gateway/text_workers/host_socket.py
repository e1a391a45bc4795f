"""Sends and reads JSON lines at the gateway's end of the socket to the host. A line may carry a descriptor; no message is dropped. What a
full socket does not take is kept: a few bytes per worker, since a new worker is refused while the host does not read.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

READ_BYTES = 1 << 16


class HostSocket:
    """The gateway's end of the socket to the text workers' host. Used on the event loop, except before it runs."""

    def __init__(self, channel: socket.socket, first: Mapping[str, object]) -> None:
        """first: sent at once, with a blocking write: the host waits for it."""
        with suppress(OSError):  # the process is gone: the next read reports it
            channel.sendall(_line(first))
        channel.setblocking(False)
        self._channel = channel
        self._unsent = bytearray()
        self._rest = b""

    def say(self, message: Mapping[str, object]) -> None:
        self._unsent += _line(message)
        self._send()

    def say_with(self, message: Mapping[str, object], fd: int) -> None:
        """Raises BlockingIOError when the other end has unread messages, OSError when it is gone."""
        if self._unsent:
            raise BlockingIOError(errno.EAGAIN, "the host process does not read")
        line = _line(message)
        self._unsent += line[socket.send_fds(self._channel, [line], [fd]) :]
        self._send()

    async def wait(self) -> list[dict[str, Any]] | None:
        """None when the other end is gone. Not to be used together with `listen`."""
        try:
            return self._messages(await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES))
        except OSError:  # a reset: the process ended with messages unread
            return None

    def listen(self, on_ready: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._channel, on_ready)

    def read(self) -> list[dict[str, Any]] | None:
        """None when the other end is gone."""
        try:
            return self._messages(self._channel.recv(READ_BYTES))
        except BlockingIOError:
            return []
        except OSError:
            return None

    def close(self) -> None:
        """Needs no event loop."""
        with suppress(RuntimeError):  # no loop runs, so no callback is registered
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel)
            loop.remove_writer(self._channel)
        self._channel.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                num_sent = self._channel.send(self._unsent)
                del self._unsent[:num_sent]
        except BlockingIOError:
            loop.add_writer(self._channel, self._send)
            return
        except OSError:  # the host is gone: the next read reports that
            self._unsent.clear()
        loop.remove_writer(self._channel)

    def _messages(self, data: bytes) -> list[dict[str, Any]] | None:
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"

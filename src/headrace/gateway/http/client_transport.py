"""Wraps the transport of one HTTP connection for uvicorn and the application: what may be written, and how the connection ended.

`http.connection` has the protocol that owns the transport, with its limits and timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.gateway.http.asgi import Scope
from headrace.gateway.http.errors import ClientLeft, SlowReader


class UntilClose(int):
    """The content length of an answer that ends with its connection. uvicorn subtracts each write from it, refuses a write beyond it, and
    complains if the rest is not 0: this value stays the same when something is subtracted, and never compares as smaller or as unequal.
    """

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> UntilClose:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class ClientTransport:
    """The transport of one connection, as uvicorn and the application see it.

    close           called by uvicorn after the last answer
    is_half_closed  the rest of the client's bytes is being discarded; uvicorn sees a closed connection
    has_left        the client closed the connection, or its sending half
    """

    cycle: RequestResponseCycle | None = None

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.transport = transport
        self.close = close
        self.write: Callable[[bytes], object] = transport.write  # called once per token: spares __getattr__
        self.is_half_closed = False
        self.has_left = False
        self._is_cut = False
        self._kept = b""
        self._on_left: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def is_closing(self) -> bool:
        return self.is_half_closed or self.transport.is_closing()

    def has_body(self, scope: Scope) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.scope is scope and not (cycle.more_body or cycle.waiting_for_100_continue)

    def watch(self, on_left: Callable[[], None]) -> None:
        """Resumes reading, without which a lost client is not noticed."""
        if self.cycle is None:
            on_left()
            return
        self._on_left = on_left
        self.cycle.flow.resume_reading()

    def end_watch(self, on_left: Callable[[], None]) -> None:
        if self._on_left == on_left:  # otherwise the connection's next request watches already
            self._on_left = None

    def connection_lost(self) -> None:
        on_left, self._on_left, self.cycle = self._on_left, None, None
        if on_left is not None:
            on_left()

    def has_room(self, scope: Scope) -> bool:
        """Whether `write_chunk` may replace uvicorn's `send`, which would neither wait nor drop the bytes, and send one chunk."""
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or not cycle.chunked_encoding:
            return False
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or self.is_closing())

    def join_writes(self) -> None:
        """Join an answer's head with the write after it."""
        self.write = self._keep

    def end_join(self) -> None:
        if self._kept:
            self._write_kept(b"")
        self.write = self.transport.write

    def _keep(self, head: bytes) -> None:
        self._kept = head
        self.write = self._write_kept

    def _write_kept(self, body: bytes) -> None:
        head, self._kept = self._kept, b""
        self.write = self.transport.write
        self.write(head + body)

    def write_chunk(self, body: bytes) -> None:
        """Frames one HTTP chunk by hand and writes it past uvicorn. Call right after `has_room`. body: not empty"""
        self.write(b"%x\r\n%b\r\n" % (len(body), body))

    def cut(self) -> None:
        """Drop the connection at once, unsent bytes included."""
        self._is_cut = True
        self.transport.abort()

    def lost(self) -> ClientLeft | SlowReader | None:
        """Why the connection is gone; None while it stands."""
        if self._is_cut:
            return SlowReader("The client did not read its answer.")
        return ClientLeft("The client left.") if self.has_left else None

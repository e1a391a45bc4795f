"""The transport of one HTTP connection as uvicorn and the application see it: what may be written, and how the connection ended.

The protocol that owns it, with its limits and timers: `http.connection`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.gateway.http.asgi import Scope
from headrace.gateway.http.errors import ClientLeft, SlowReader


class UntilClose(int):
    """The content length of an answer that ends with its connection.

    uvicorn subtracts what it writes from the length that it expects, refuses to write more than is left, and complains at the end unless
    nothing is left. Here subtracting changes nothing, nothing is too much, and what is left counts as nothing.
    """

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> UntilClose:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class ClientTransport:
    """The transport as uvicorn and the application see it. The protocol closes it; it knows how the connection ended.

    close           what uvicorn calls after the last answer, whether the client's body is complete or not
    is_half_closed  the sending half is closed and some of the client's bytes are still to come: closed, as far as uvicorn knows
    has_left        the client closed the connection or its half of it
    cycle           uvicorn's state of the latest request
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
        """Whether the body of this request has arrived whole. False where a later request waits behind it."""
        cycle = self.cycle
        return cycle is not None and cycle.scope is scope and not (cycle.more_body or cycle.waiting_for_100_continue)

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once the connection is lost, at once if it is. Reads on, as a client that leaves is noticed by that alone."""
        if self.cycle is None:
            on_left()
            return
        self._on_left = on_left
        self.cycle.flow.resume_reading()

    def end_watch(self, on_left: Callable[[], None]) -> None:
        if self._on_left == on_left:  # else the next request of the connection watches already
            self._on_left = None

    def connection_lost(self) -> None:
        """Called by the protocol, last."""
        on_left, self._on_left, self.cycle = self._on_left, None, None
        if on_left is not None:
            on_left()

    def has_room(self, scope: Scope) -> bool:
        """Whether the next bytes of this request's answer could be written at once: `RequestResponseCycle.send` would not wait, would
        not drop them, and would send them as one HTTP chunk. False while a later request waits behind this one.
        """
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or not cycle.chunked_encoding:
            return False
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or self.is_closing())

    def join_writes(self) -> None:
        """Keep what is written next, an answer's head, until the write after it: one system call for both, and one packet."""
        self.write = self._keep

    def end_join(self) -> None:
        """Write what is kept, where nothing came after it."""
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
        """Right after `has_room`. body: not empty."""
        self.write(b"%x\r\n%b\r\n" % (len(body), body))

    def cut(self) -> None:
        """Drop a client that does not read, with its unsent bytes."""
        self._is_cut = True
        self.transport.abort()

    def lost(self) -> ClientLeft | SlowReader | None:
        """Why nothing reaches the client any more; None while something may."""
        if self._is_cut:
            return SlowReader("The client did not read its answer.")
        return ClientLeft("The client left.") if self.has_left else None

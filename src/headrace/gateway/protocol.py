"""One HTTP/1.1 connection: uvicorn's httptools protocol within bounds of size, count and time.

uvicorn parses and frames; what it leaves open and a public server must close is here:

    head      request line and headers: bytes, count, seconds
    body      framing overhead (floods of tiny chunks, chunk extensions); the body's own size and time are `Exchange.body`'s
    leftover  a body nobody reads any more, because the answer is out: thrown away for a moment, then the connection goes
    answer    a client that does not catch up with 64 KiB of unsent bytes
    abort     `scope["extensions"]["headrace.abort"]` drops the connection, unsent bytes included
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.gateway.config import GatewayConfig
from headrace.gateway.errors import BAD_HTTP, ErrorBody, ErrorObject
from headrace.gateway.exchange import ABORT_EXTENSION

SEND_BUFFER_BYTES = 64 << 10
"""The transport asks writers to wait beyond this much unsent data."""

LINGER_S = 2.0
"""How long the rest of an unwanted body is thrown away, so that its sender gets to read the refusal."""

FRAMING_SLACK_BYTES = 64 << 10
MAX_FRAMING_FACTOR = 2
"""A body may cost this many wire bytes per byte beyond the slack. Each chunk costs the event loop microseconds, whatever its size:
chunks of one byte cost 6 bytes each, those of a sane client hardly more than one per byte; extensions and trailers cost anything."""

REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


OnRefused = Callable[[str, int], None]
"""Told of each answer that is given here and not by the application: its x-request-id and status."""


def protocol_for(config: GatewayConfig, on_refused: OnRefused) -> type[HttpToolsProtocol]:
    """uvicorn makes protocols from a class, so a configuration is bound to one."""

    class ConfiguredProtocol(BoundedProtocol):
        bounds = config

        def tell_refused(self, request_id: str, status: int) -> None:
            on_refused(request_id, status)

    return ConfiguredProtocol


class BoundedProtocol(HttpToolsProtocol):
    """Use a subclass from `protocol_for`."""

    bounds: GatewayConfig

    def tell_refused(self, request_id: str, status: int) -> None:
        """Called after each answer that is given here."""
        raise NotImplementedError

    _is_in_head = True
    _is_in_body = False
    _is_refused = False
    _read_bytes = 0
    _wire_bytes = 0
    _body_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    # -- the connection ----------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.limits.max_connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
        self._head_timer = self._after(self.bounds.timeouts.header_s, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers("_head_timer", "_linger_timer", "_write_timer")
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after an answer. Bytes the client never took would hold the socket for ever: they go with it."""
        if not self.transport.is_closing():
            self._close()

    # -- what arrives ------------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._read_bytes = len(data)
        self._wire_bytes += len(data)
        super().data_received(data)
        limits = self.bounds.limits
        if self._is_in_head:
            # A finished head was judged in on_headers_complete; what is here is the beginning of one.
            if self._wire_bytes > limits.max_header_bytes:
                self._refuse(431, f"Headers must be at most {limits.max_header_bytes} bytes.")
        elif self._is_idle:
            # What came begins nothing (parsers skip a stray CRLF), but it stopped uvicorn's timer. More of it does not stop ours.
            if self._head_timer is None:
                self._head_timer = self._after(self.bounds.timeouts.header_s, self._close)
        elif self._is_in_body and self._wire_bytes > FRAMING_SLACK_BYTES + MAX_FRAMING_FACTOR * self._body_bytes + limits.max_header_bytes:
            self._refuse(400, "The body's chunks carry too little.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_in_body = True, False
        self._wire_bytes, self._body_bytes = self._read_bytes, 0  # at most: an earlier message's end may be in the same read
        self._stop_timers("_head_timer")
        self._head_timer = self._after(self.bounds.timeouts.header_s, self._head_late)
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers are read over: nobody would look at them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timers("_head_timer")
        if self._is_refused or self.transport.is_closing():
            return  # pipelined behind something that was refused
        limits = self.bounds.limits
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > limits.max_headers:
            self._refuse(431, f"At most {limits.max_headers} headers are read.")
        elif size > limits.max_header_bytes:
            self._refuse(431, f"Headers must be at most {limits.max_header_bytes} bytes.")
        else:
            self._is_in_body = True
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not (self._is_refused or self.transport.is_closing()):
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        if not (self._is_refused or self.transport.is_closing()):
            self._stop_timers("_linger_timer")
            super().on_message_complete()

    # -- what leaves -------------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and not self.transport.is_closing():
            self._linger_timer = self._after(LINGER_S, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self._after(self.bounds.timeouts.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_timers("_write_timer")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what httptools cannot parse, in OpenAI's shape."""
        self._refuse(400, "Invalid HTTP request.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in the application's place, hear no more, and close.

        The sending half is closed at once and the rest LINGER_S later: closing over unread bytes would reset the connection, and the
        client would lose the answer.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timers("_head_timer")
        if not self._may_answer():
            self._close()
            return
        body = msgspec.json.encode(ErrorBody(ErrorObject(message, "invalid_request_error", None, BAD_HTTP)))
        request_id = os.urandom(12).hex()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\nconnection: close\r\n\r\n%s"
            % (status, REASONS[status], len(body), request_id.encode(), body)
        )
        self.transport.write_eof()
        self.tell_refused(request_id, status)
        self._linger_timer = self._after(LINGER_S, self._close)

    @property
    def _is_idle(self) -> bool:
        """Between an answer and the next request."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and not (self._is_in_head or self._is_in_body or self.pipeline)

    def _may_answer(self) -> bool:
        """Whether an answer written now would be the next one the client waits for. If so, nobody else writes it."""
        cycle = self.cycle
        if not self._is_in_body:
            return cycle is None or cycle.response_complete
        if self.pipeline or cycle.response_started:
            return False
        cycle.disconnected = True  # for the application the client has left
        cycle.message_event.set()
        return True

    def _head_late(self) -> None:
        if not self._is_in_head:
            return
        if self._wire_bytes:
            self._refuse(408, f"Headers must arrive within {self.bounds.timeouts.header_s:g} s.")
        else:
            self._close()

    def _close(self) -> None:
        """Close after what is written was sent; a client that does not take it has `write_s`."""
        self.transport.close()
        if self.transport.get_write_buffer_size() and self._write_timer is None:
            self._write_timer = self._after(self.bounds.timeouts.write_s, self.transport.abort)

    def _after(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, call)

    def _stop_timers(self, *names: str) -> None:
        for name in names:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

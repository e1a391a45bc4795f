"""Serves one HTTP/1.1 connection: uvicorn's httptools protocol with bounds on size, count and time.

The bounds that uvicorn does not have:

    head      request line and headers: bytes, count, seconds. A TLS handshake is named in the log and closed
    body      framing overhead (floods of tiny chunks, chunk extensions). `Exchange.body` bounds the body's own size and time
    leftover  the rest of a body whose answer is out: discarded for a moment, then the connection is closed
    upgrade   an offer of another protocol (h2c, WebSocket, TLS) is ignored, as RFC 9110, 7.8 allows. CONNECT and HTTP/2 are refused
    refusal   is written behind the answers that are due to earlier requests of the connection; nothing that follows it is read
    answer    a client that does not catch up with 64 KiB of unsent bytes is cut off; an HTTP/1.0 answer has no chunks

`http.asgi` has the extension that the application gets.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.gateway.http.asgi import CONNECTION_EXTENSION, Headers
from headrace.gateway.http.client_transport import ClientTransport, UntilClose
from headrace.gateway.http.config import ServerConfig
from headrace.gateway.http.errors import BAD_HTTP, ErrorBody, ErrorObject
from headrace.gateway.http.origins import METHODS, Origins
from headrace.gateway.http.tls import TLS_HANDSHAKE, TlsNotice

SEND_BUFFER_BYTES = 64 << 10

MAX_HEADER_BYTES = 32 << 10

MAX_HEADERS = 100

HEADER_S = 10.0
"""From the connection, or from the first byte behind an earlier answer, to the last header byte."""

WRITE_S = 30.0
"""For the next SEND_BUFFER_BYTES."""

LINGER_S = 2.0
"""The rest of an unwanted body is discarded."""

MAX_LINGER_BYTES = 64 << 20

FRAMING_SLACK_BYTES = 64 << 10
MAX_FRAMING_FACTOR = 2
"""Wire bytes that each byte of a body may take, beyond the slack. A chunk of one byte takes 6; usual clients hardly more than one per byte;
extensions and trailers may take any number.
"""

REASONS = {
    400: b"Bad Request",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}
NO_HTTP = "Invalid HTTP request."
NO_HTTP2 = "HTTP/2 is not served here. Send HTTP/1.1, as curl --http1.1 does."
NO_TUNNEL = "CONNECT is not served: this is no proxy. Send the request itself, to a path."
ONLY_CHUNKED = "Transfer-Encoding: only chunked is read. A packed body is named by Content-Encoding."

OnRefused = Callable[[str, int, str], None]
"""Gets x-request-id, status and message."""


def protocol_for(config: ServerConfig, on_refused: OnRefused) -> type[BoundedProtocol]:
    class ConfiguredProtocol(BoundedProtocol):
        tls_notice = TlsNotice()

        def log_refusal(self, request_id: str, status: int, message: str) -> None:
            on_refused(request_id, status, message)

    ConfiguredProtocol.follow(config)
    return ConfiguredProtocol


def refusal_bytes(status: int, request_id: str, error: ErrorObject, headers: Headers) -> bytes:
    body = msgspec.json.encode(ErrorBody(error))
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"x-request-id", request_id.encode())]
    lines = [b"%b: %b\r\n" % header for header in (*own, *headers, (b"connection", b"close"))]
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, REASONS[status], b"".join(lines), body)


class _Refusal(NamedTuple):
    request_id: str
    status: int
    message: str
    written: bytes


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the bounds that the module's header names. Use a subclass from `protocol_for`."""

    origins: Origins
    tls_notice: TlsNotice
    _client: ClientTransport

    @classmethod
    def follow(cls, config: ServerConfig) -> None:
        cls.origins = Origins(config.allowed_origins)

    def log_refusal(self, request_id: str, status: int, message: str) -> None:
        raise NotImplementedError

    _has_begun = False
    _is_in_head = True
    _is_in_body = False
    _read_bytes = 0
    _wire_bytes = 0
    _head_bytes = 0
    _body_bytes = 0
    _unwanted_bytes = 0
    _write_goal_bytes = 0
    _refusal: _Refusal | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    # -- the connection ----------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._client = ClientTransport(transport, self._hang_up)
        super().connection_made(cast(asyncio.Transport, self._client))
        # One mark for both: with a lower one to resume at, a reader would have to take more than this within WRITE_S.
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES, low=SEND_BUFFER_BYTES)
        self._head_timer = self._after(HEADER_S, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers("_head_timer", "_linger_timer", "_write_timer")
        self._client.has_left = True
        self._client.close = self._client.transport.close  # nothing is left to time, and this object is not kept alive by its method
        super().connection_lost(exc)
        self._client.connection_lost()

    def eof_received(self) -> None:
        self._client.has_left = True
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        """Without WRITE_S a client that never reads would hold the socket for ever."""
        if not self.transport.is_closing():
            self._close()

    # -- what arrives ------------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None or self._refusal is not None:
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > MAX_LINGER_BYTES:
                self._close()
        if self._is_ending:
            return
        if self._is_in_head and not self._wire_bytes and data[0] == TLS_HANDSHAKE:
            self.tls_notice(self.client[0] if self.client else "a client")
            self._close()
            return
        self._read_bytes = len(data)
        self._wire_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._is_ending:
            return
        if self._is_in_head:
            # on_headers_complete checks a complete head; this is an incomplete one.
            if self._wire_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"Headers must be at most {MAX_HEADER_BYTES} bytes.")
            elif self._head_timer is None:
                self._head_timer = self._after(HEADER_S, self._head_late)
        elif self._is_idle:
            # These bytes begin no request (parsers skip a stray CRLF), but they stopped uvicorn's timer. More of them do not stop this one.
            if self._head_timer is None:
                self._head_timer = self._after(HEADER_S, self._close)
        elif self._is_in_body and self._wire_bytes > FRAMING_SLACK_BYTES + MAX_FRAMING_FACTOR * self._body_bytes + MAX_HEADER_BYTES:
            self._refuse(400, "The body's chunks carry too little.")

    def _parse(self, data: bytes) -> None:
        """uvicorn's own parsing drops the bytes after an offer of another protocol in the same read."""
        rest: bytes | memoryview = data
        try:
            while (behind := self._after_offer(rest)) is not None and not self._is_ending:
                self._ignore_offer()
                rest = behind
        except httptools.HttpParserError:
            self._refuse(400, NO_HTTP2 if self.parser.get_method() == b"PRI" else NO_HTTP)

    def _after_offer(self, data: bytes | memoryview) -> memoryview | None:
        """The bytes after a head that offers another protocol, where the parser stops."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            offset: int = stop.args[0]
            return memoryview(data)[offset:]
        return None

    def _ignore_offer(self) -> None:
        """A parser that saw an offer would take the body's bytes for the next request, so a new one parses the head again without
        `Upgrade`.
        """
        wire_bytes, version = self._wire_bytes, self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn makes it
        self.parser.feed_data(head)
        self._wire_bytes = wire_bytes

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun, self._is_in_head, self._is_in_body = True, True, False
        self._wire_bytes, self._body_bytes = self._read_bytes, 0  # at most: an earlier message's end may be in the same read
        self._head_bytes = 0
        self._stop_timers("_head_timer")  # most heads are complete at once; `data_received` times the others
        extensions: dict[str, Any] = {CONNECTION_EXTENSION: self._client}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers are skipped
            self._head_bytes += len(name) + len(value) + 4
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timers("_head_timer")
        if self._is_ending:
            return  # pipelined behind something that was refused
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"At most {MAX_HEADERS} headers are read.")
        elif len(self.url) + self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"Headers must be at most {MAX_HEADER_BYTES} bytes.")
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(405, NO_TUNNEL, [(b"allow", METHODS)])
        elif self._has_other_coding():
            self._refuse(501, ONLY_CHUNKED)
        elif not self.parser.should_upgrade():  # a head with an offer is parsed again: `_ignore_offer`
            self._is_in_body = True
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":  # HTTP/1.0 has no chunks: without a length an answer ends with its connection
                self.cycle.chunked_encoding, self.cycle.expected_content_length = False, UntilClose()
            self._client.cycle = self.cycle

    def _has_other_coding(self) -> bool:
        """The parser itself refuses a list that does not end with chunked."""
        values = b",".join(value for name, value in self.headers if name == b"transfer-encoding")
        codings = [coding for word in values.lower().split(b",") if (coding := word.strip(b" \t"))]
        return codings[-1:] == [b"chunked"] and len(codings) > 1

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._is_ending:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only the head is complete: `_ignore_offer`
        self._has_begun = self._is_in_body = False
        if not self._is_ending:
            self._stop_timers("_linger_timer")
            super().on_message_complete()

    # -- what leaves -------------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        is_last_due = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is not None and is_last_due:
            self._write_refusal(self._refusal)
        elif self._is_in_body and self.cycle.response_complete:
            self._linger()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_writing()

    def resume_writing(self) -> None:
        self._stop_timers("_write_timer")
        super().resume_writing()
        if self.transport.is_closing():
            self._time_writing()  # no write follows that would time the bytes that are left

    def _refuse(self, status: int, message: str, headers: Headers = ()) -> None:
        if self._is_ending:
            return
        is_earlier_due = self._is_earlier_due
        if self._is_in_body and not self._withdraw():
            self._close()
            return
        request_id = os.urandom(12).hex()
        more = [*headers, *self.origins.answer_headers(self.headers if self._has_begun else ())]
        error = ErrorObject(message, "invalid_request_error", None, BAD_HTTP)
        self._refusal = _Refusal(request_id, status, message, refusal_bytes(status, request_id, error, more))
        self._unwanted_bytes = 0
        self._stop_timers("_head_timer")
        if not is_earlier_due:
            self._write_refusal(self._refusal)

    def _write_refusal(self, refusal: _Refusal) -> None:
        self.transport.write(refusal.written)
        self._half_close()
        self.log_refusal(refusal.request_id, refusal.status, refusal.message)

    @property
    def _is_ending(self) -> bool:
        return self._refusal is not None or self.transport.is_closing()

    @property
    def _is_earlier_due(self) -> bool:
        if self._is_in_body:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _withdraw(self) -> bool:
        """False where its answer has begun."""
        if self.pipeline:
            self.pipeline.popleft()  # the latest: its turn has not come
        elif self.cycle.response_started:
            return False
        else:
            self.cycle.disconnected = True  # for the application the client has left
            self.cycle.message_event.set()
        return True

    @property
    def _is_idle(self) -> bool:
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and not (self._is_in_head or self._is_in_body or self.pipeline)

    def _head_late(self) -> None:
        if not self._is_in_head:
            return
        if self._wire_bytes:
            self._refuse(408, f"Headers must arrive within {HEADER_S:g} s.")
        else:
            self._close()

    def _hang_up(self) -> None:
        """Called by uvicorn."""
        if self._is_in_body and self._linger_timer is None:
            self._half_close()
        else:
            self._close()

    def _half_close(self) -> None:
        """Closing with unread bytes would reset the connection, and the client would lose the answer."""
        self._client.is_half_closed = True
        self._stop_timers("_head_timer")
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

    def _linger(self) -> None:
        self._unwanted_bytes = 0
        self._stop_timers("_linger_timer")
        self._linger_timer = self._after(LINGER_S, self._close)

    def _close(self) -> None:
        """Cut off a client that does not read the written bytes within WRITE_S."""
        self._client.transport.close()
        if self.transport.get_write_buffer_size() and self._write_timer is None:
            self._time_writing()

    def _time_writing(self) -> None:
        self._write_goal_bytes = max(0, self.transport.get_write_buffer_size() - SEND_BUFFER_BYTES)
        self._stop_timers("_write_timer")
        self._write_timer = self._after(WRITE_S, self._write_late)

    def _write_late(self) -> None:
        if self.transport.get_write_buffer_size() > self._write_goal_bytes:
            self._client.cut()
        else:
            self._time_writing()

    def _after(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, call)

    def _stop_timers(self, *names: str) -> None:
        for name in names:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

"""The HTTP server: uvicorn with httptools, plus what it leaves out and a public server needs.

uvicorn parses and frames HTTP/1.1; here come the bounds on what arrives before a request exists (header bytes and count, time), the
means to drop a connection with unsent bytes (`headrace.abort`), and a shutdown in our order: refuse, finish, stop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.gateway.config import GatewayConfig
from headrace.gateway.errors import ErrorBody, ErrorObject
from headrace.gateway.exchange import ABORT_EXTENSION

log = logging.getLogger("headrace.gateway")

SEND_BUFFER_BYTES = 64 << 10
"""The transport asks writers to wait beyond this much unsent data."""

BACKLOG = 2048
REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def protocol_for(config: GatewayConfig) -> type[HttpToolsProtocol]:
    """uvicorn makes protocols from a class, so the bounds are bound to one."""
    limits, timeouts = config.limits, config.timeouts

    class BoundedProtocol(HttpToolsProtocol):
        """One connection. A head (request line and headers) has a size, a count and a time it must stay within."""

        _head_bytes = 0
        _is_in_head = True
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            # What came in one read behind the head belongs to the body; only an unfinished head is judged here.
            if self._is_in_head and self._head_bytes > limits.max_header_bytes:
                self._refuse(431, f"Headers must be at most {limits.max_header_bytes} bytes.")

        def send_400_response(self, msg: str) -> None:
            """Called for what httptools cannot parse. OpenAI's shape, and only once."""
            self._refuse(400, "Invalid HTTP request.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._is_in_head = True
            self._head_bytes = 0
            if self._head_timer is None:
                self._arm()
            self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            self._disarm()
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.headers) > limits.max_headers:
                self._refuse(431, f"At most {limits.max_headers} headers are read.")
            elif size > limits.max_header_bytes:
                self._refuse(431, f"Headers must be at most {limits.max_header_bytes} bytes.")
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None and not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            if self.cycle is not None and not self.transport.is_closing():
                super().on_message_complete()

        def _arm(self) -> None:
            self._head_timer = self.loop.call_later(timeouts.header_s, self._head_late)

        def _disarm(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_late(self) -> None:
            self._head_timer = None
            if self._is_in_head:
                self._refuse(408, f"Headers must arrive within {timeouts.header_s:g} s.")

        def _refuse(self, status: int, message: str) -> None:
            """Answer without a request and close. A connection on which nothing was sent yet is closed without a word."""
            if self.transport.is_closing():
                return
            if status != 408 or self._head_bytes:
                body = msgspec.json.encode(ErrorBody(ErrorObject(message, "invalid_request_error", None, "bad_http")))
                self.transport.write(
                    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                    % (status, REASONS[status], len(body), body)
                )
            self.transport.close()

    return BoundedProtocol


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: `gateway.main` decides when to stop."""

    def __init__(self, app: Any, config: GatewayConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=protocol_for(config),
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=True,
                backlog=BACKLOG,
                timeout_keep_alive=max(1, round(config.timeouts.keep_alive_s)),
                timeout_graceful_shutdown=1,
            )
        )

    async def start(self) -> int:
        """Listen. Returns the port. Raises OSError when the address cannot be bound."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.on_tick(0)
        await self.startup()
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then close: idle connections at once, the others after their answer, within a second."""
        counter = 0
        while not stop.is_set():
            counter = (counter + 1) % 864_000
            await self.on_tick(counter * 10)  # keeps the Date header current
            try:
                async with asyncio.timeout(1.0):
                    await stop.wait()
            except TimeoutError:
                continue
        await self.shutdown()

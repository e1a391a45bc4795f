"""Handles one HTTP request and its answer, on bare ASGI: reads the body within its bounds, answers once, and notices that the client left.

No framework object stands between a token and the socket: Starlette's objects cost more per chunk than all other work on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.core.errors import HeadraceError
from headrace.core.ids import RequestId
from headrace.gateway.http.asgi import (
    CONNECTION_EXTENSION,
    OPENAI,
    PIECE_BYTES,
    Framing,
    Headers,
    Receive,
    Scope,
    Send,
    joined_pieces,
)
from headrace.gateway.http.content_encoding import decoder_of
from headrace.gateway.http.errors import BodyTooLarge, ClientLeft, ErrorReply, ReadTimeout, UnsupportedMediaType
from headrace.observe.timeline import StageMarks

if TYPE_CHECKING:
    from headrace.gateway.http.client_transport import ClientTransport

T = TypeVar("T")

_JSON = (b"content-type", b"application/json")


class Watching:
    """Inside the block, a client that leaves ends the answer at once, with the callbacks of `on_ended`. Enter it after reading the body."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aenter__(self) -> None:
        self._exchange.connection.watch(self._exchange.client_left)

    async def __aexit__(self, *error: object) -> None:
        self._exchange.connection.end_watch(self._exchange.client_left)
        self._exchange.forget_callbacks()


class Exchange:
    """One request and its answer.

    status         HTTP status of the answer; 0: it has not begun
    marks          the stages that the request has entered since its headers were complete
    end_reason     error that ends the answer early (client left, deadline passed, shutdown); None: it goes on
    more_headers   from `add_headers`
    late_headers   called when the answer begins, for headers known only then: the rest of the caller's limits
    ignored        names, never values, of body fields that changed nothing, for x-headrace-ignored
    body_digest    digest of path, session and body; a continued stream or a retry must have the same
    pending_bytes  bytes of the running write that the transport has not taken yet
    """

    __slots__ = (
        "_closed",
        "_is_event_stream",
        "_on_ended",
        "_receive",
        "_repeated",
        "_send",
        "_values",
        "body_digest",
        "connection",
        "end_reason",
        "framing",
        "headers",
        "ignored",
        "late_headers",
        "marks",
        "more_headers",
        "pending_bytes",
        "request_id",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, request_id: RequestId, marks: StageMarks) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.request_id = request_id
        self.marks = marks
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._values = dict(self.headers)
        self._repeated = _repeated(self.headers) if len(self._values) < len(self.headers) else frozenset()
        self.framing: Framing = OPENAI
        self.status = 0
        self.ignored: list[str] = []
        self.end_reason: HeadraceError | None = None
        self.more_headers: Headers = ()
        self.late_headers: Callable[[], Headers] | None = None
        self.body_digest = b""
        self.pending_bytes = 0
        self.connection: ClientTransport = scope["extensions"][CONNECTION_EXTENSION]
        self._closed = False
        self._is_event_stream = False
        self._on_ended: list[Callable[[], None]] = []

    @property
    def arrived_at(self) -> float:
        return self.marks.entered[0][1]

    # -- the request -------------------------------------------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes | None:
        """The value of a header that the request has exactly once; else None."""
        return None if name in self._repeated else self._values.get(name)

    def has_header(self, name: bytes) -> bool:
        return name in self._values

    async def json_body(self, *, max_bytes: int, timeout_s: float, hold: Callable[[int], None]) -> bytes:
        """hold: called with the bytes of each part; may raise. Raises UnsupportedMediaType, and what `body` raises."""
        media_type = (self.header(b"content-type") or b"").split(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType("The body must be JSON: send 'Content-Type: application/json'.")
        return await self.body(max_bytes=max_bytes, timeout_s=timeout_s, hold=hold)

    async def body(self, *, max_bytes: int, timeout_s: float, hold: Callable[[int], None]) -> bytes:
        """`max_bytes` bounds the received and the decoded bytes.

        Raises UnsupportedEncoding, InvalidRequest for damaged compression, BodyTooLarge (by Content-Length before reading), ReadTimeout or
        ClientLeft, and what `hold` raises.
        """
        if self.connection.has_body(self.scope):
            return await self._read_body(max_bytes, hold)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_body(max_bytes, hold)
        except TimeoutError:
            raise ReadTimeout(f"The body did not arrive within {timeout_s:g} s.") from None

    async def _read_body(self, max_bytes: int, hold: Callable[[int], None]) -> bytes:
        has_encoding = self.has_header(b"content-encoding")
        decoder = decoder_of([value for name, value in self.headers if name == b"content-encoding"] if has_encoding else (), max_bytes)
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced[:20]) > max_bytes:
            raise BodyTooLarge(int(announced[:20]), max_bytes)
        chunks: list[bytes] = []
        received = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft("The client left before its body was read.")
            chunk: bytes = message.get("body", b"")
            received += len(chunk)
            if received > max_bytes:
                raise BodyTooLarge(received, max_bytes)
            for part in decoder.parts(chunk):
                hold(len(part))
                chunks.append(part)
                if part is not chunk:
                    await asyncio.sleep(0)  # other requests are served between two decoded slices
            if not message.get("more_body", False):
                decoder.end()
                return b"".join(chunks)

    def add_headers(self, *headers: tuple[bytes, bytes]) -> None:
        self.more_headers = (*self.more_headers, *headers)

    # -- an answer that ends early ------------------------------------------------------------------------------------------------------

    def watching(self) -> Watching:
        return Watching(self)

    def client_left(self) -> None:
        self.end(self.connection.lost() or ClientLeft("The client left."))

    def forget_callbacks(self) -> None:
        self._on_ended.clear()

    def on_ended(self, callback: Callable[[], None]) -> None:
        """At once if the answer has ended early already."""
        if self.end_reason is not None:
            callback()
        else:
            self._on_ended.append(callback)

    async def unless_ended(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """If the answer ends or has ended early, `work` is cancelled and `end_reason` raised.

        `work` runs in the caller's task: another task would cost a round of the event loop.
        """
        if self.end_reason is not None:
            work.cancel() if isinstance(work, asyncio.Future) else work.close()
            raise self.end_reason
        task = asyncio.current_task()
        assert task is not None
        num_cancelled, is_cut = task.cancelling(), False

        def cancel() -> None:
            nonlocal is_cut
            is_cut = task.cancel()

        self._on_ended.append(cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if self.end_reason is not None and is_cut and task.cancelling() == num_cancelled + 1:  # by nothing but `cancel`
                raise self.end_reason from None
            raise
        finally:
            if is_cut:
                task.uncancel()
            if cancel in self._on_ended:  # `cancel` would keep the result of `work` alive as long as the request
                self._on_ended.remove(cancel)

    def end(self, error: HeadraceError) -> None:
        """The error is sent to the client if it still reads. A later call changes nothing."""
        if self.end_reason is None:
            self.end_reason = error
            callbacks, self._on_ended = self._on_ended, []
            for callback in callbacks:
                callback()

    def abort(self, error: HeadraceError) -> None:
        """`end`, and drop the connection with its unsent bytes."""
        self.end(error)
        self.connection.cut()

    # -- the answer --------------------------------------------------------------------------------------------------------------

    async def reply(self, status: int, body: bytes, headers: Headers = (_JSON,)) -> None:
        """Writes the head and the body's first piece in one write. Raises `end_reason`, ClientLeft or SlowReader."""
        head = [*headers, (b"content-length", b"%d" % len(body))]
        if self.scope["method"] == "HEAD":  # HEAD has no body to join the head with
            await self.start(status, head)
            await self.write(body, is_last=True)
            return
        self.connection.join_writes()
        try:
            await self.start(status, head)
            await self.write(body, is_last=True)
        finally:
            self.connection.end_join()

    async def reply_parts(self, parts: Sequence[bytes]) -> None:
        """The parts are never joined, for some are large."""
        await self.start(200, [_JSON, (b"content-length", b"%d" % sum(map(len, parts)))])
        slices = (part[first : first + PIECE_BYTES] for part in parts for first in range(0, len(part), PIECE_BYTES))
        for piece in joined_pieces(slices):
            await self.write(piece)
        await self.write(b"", is_last=True)

    async def reply_in_pieces(self, pieces: AsyncGenerator[bytes]) -> None:
        """Each piece is made after the transport has taken the one before. pieces: closed in every case"""
        async with aclosing(pieces):
            await self.start(200, [_JSON])
            async for piece in pieces:
                await self.write(piece)
            await self.write(b"", is_last=True)

    async def fail(self, error: ErrorReply) -> None:
        with suppress(HeadraceError):  # the client has left
            if not self.status:
                await self.reply(error.status, self.framing.error_body(error), [_JSON, *self.framing.error_headers(error)])
            elif self._is_event_stream:
                await self.write(self.framing.error_event(error), is_last=True)

    async def start(self, status: int, headers: Headers, *, is_event_stream: bool = False) -> None:
        self.status = status
        self._is_event_stream = is_event_stream
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    *self.more_headers,
                    *(self.late_headers() if self.late_headers is not None else ()),
                    *((b"x-headrace-ignored", ", ".join(self.ignored).encode()) for _ in self.ignored[:1]),
                    (b"x-request-id", self.request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ],
            }
        )

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Writes pieces, each when the transport has room: a client that does not read makes this wait.

        Raises, when the connection is lost before all bytes are written, `end_reason` if it is set, else ClientLeft or SlowReader.
        """
        if self._closed:
            return
        self._closed = is_last
        for first in range(0, len(body) or 1, PIECE_BYTES):
            self.pending_bytes = len(body) - first
            has_more = not is_last or self.pending_bytes > PIECE_BYTES
            await self._send({"type": "http.response.body", "body": body[first : first + PIECE_BYTES], "more_body": has_more})
            if (lost := self.connection.lost()) is not None:
                raise self.end_reason or lost
        self.pending_bytes = 0

    @property
    def has_room(self) -> bool:
        if self.pending_bytes or self._closed or self.end_reason is not None:
            return False
        return self.connection.has_room(self.scope)

    def write_now(self, body: bytes) -> None:
        """`write` without waiting. Call right after `has_room`."""
        if body:
            self.connection.write_chunk(body)


def _repeated(headers: Headers) -> frozenset[bytes]:
    counts = Counter(name for name, _ in headers)
    return frozenset(name for name, count in counts.items() if count > 1)

"""Event streams that their clients may continue: what is kept of them, for how long, and the checks before one is continued.

    stream ends --keep--> store --find (checks), claim--> ContinuedStream --> `generation.run` replays its events and goes on

The rules stand in docs/failover.md. What the upstream needs to go on is bytes here. Nothing that a request waits for takes longer than
STORE_S because of the store.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.core.ids import RequestId
from headrace.gateway.generation.event_log import HEADER, NO_EVENT, EventId, places_of
from headrace.gateway.http.errors import ClientLeft, SlowReader, StreamConflict, UnknownStream
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed
from headrace.gateway.upstream.seam import EarlierOutput
from headrace.observe.resume_metrics import ContinueOutcome, KeepOutcome, ResumeMetrics

log = logging.getLogger("headrace.gateway")

STORE_S = 0.25
"""Seconds that a request waits for the store; then it is answered 503."""

GIVE_WAY_S = 1.0
"""Seconds after which a stream that is being sent gives way to a newer connection of its client. Before, the newer one gets 409, so that of
two resumes at once one wins."""

SIBLINGS_S = 0.15
"""Seconds that the other workers of this port have to end a stream and keep it: a part of STORE_S."""

END_STREAM = "end stream"
"""Question to another worker. Its argument is the stream's id and `_owner`, its answer empty where it does not send that stream."""

HAS_ENDED, HAS_JUST_BEGUN = b"ended", b"just begun"

CLAIM_BYTES = 8
"""Bytes that tell one claim from another: one that is given back must not end another one."""

GIVE_BACK_PAUSES_S = (0.25, 0.25, 0.5, 1.0, 2.0)
"""Seconds between attempts to give a claim back of which it is not known whether it has taken effect."""

WRITE_S = 5.0
"""Seconds that writing an entry may take, which no request waits for; then the entry is given up."""

MAX_WRITING_BYTES = 32 << 20
"""Bytes of entries that are being written. An entry beyond them is given up: the store is slower than clients leave."""

MAX_WRITES = 64
"""Entries that are written at a time."""

LOG_EVERY_S = 10.0
"""Least seconds between two warnings about the store: under a storm each stream would give one."""

FORM = 1
"""The form of entries that this version writes. An entry of another form is unknown."""

UNKNOWN = (
    "No stream of yours has this id here now: another gateway may still be sending it over a connection that has broken, it was kept too "
    "long ago, or it never was one."
)
BUSY, BUSY_RETRY_S = "Another request continues this stream now.", 1.0


class KeptStream(Struct, array_like=True, frozen=True):
    """One stream in the store.

    body           digest of the path and the body of its request
    created        Unix seconds of the answer's beginning
    num_sequences  of the request;  entries: as `EventLog` has them
    state          the upstream's, for `EarlierOutput`
    is_claimed     a request continues the stream: entries are empty, and state is drawn, so that no two claims are equal
    """

    form: int
    tenant: str
    body: bytes
    created: int
    num_sequences: int
    entries: bytes
    state: bytes
    is_claimed: bool = False


_encode, _decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(KeptStream)


@dataclass(frozen=True, slots=True)
class ContinuedStream:
    """A stream that the client may have.

    num_seen  events that it has already
    value     the entry as it was found, which a claim replaces
    waited_s  seconds that the request has waited for the store
    """

    answer_id: RequestId
    num_seen: int
    kept: KeptStream
    value: bytes
    waited_s: float = 0.0

    @property
    def entries(self) -> array[int]:
        return array("i", self.kept.entries)

    @property
    def earlier(self) -> EarlierOutput:
        places = [0] * self.kept.num_sequences
        for index, place in places_of(self.entries[: self.num_seen], self.kept.num_sequences):
            places[index] = place
        return EarlierOutput(answer_id=self.answer_id, state=self.kept.state, places=places)


@dataclass(slots=True, eq=False)
class OpenStream:
    """A stream that is being sent, or that has ended and whose entry is being written.

    begun_at  on the event loop's clock
    closed    neither any more
    """

    exchange: Exchange
    begun_at: float
    is_ended: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class OtherWorkers(Protocol):
    """The part of `gateway.siblings.Siblings` that is used here."""

    def handle(self, question: str, handler: Callable[[str], Awaitable[bytes]]) -> None: ...
    async def ask_others(self, question: str, argument: str) -> list[bytes]: ...


def body_digest(path: str, body: bytes) -> bytes:
    digest = blake2b(path.encode() + b"\0", digest_size=16)
    digest.update(body)
    return digest.digest()


def is_worth_keeping(error: BaseException | None) -> bool:
    """Whether the client may want the rest of a stream that ended so. None: it was sent whole, and perhaps not received."""
    return error is None or isinstance(error, ClientLeft | SlowReader | Unavailable | asyncio.CancelledError)


class KeptStreams:
    """The streams of one gateway, and its way to the store. `close` writes what is left."""

    def __init__(self, store: Store | None, *, ttl_s: float, metrics: ResumeMetrics) -> None:
        """store: None: no stream is kept, and events have no ids"""
        self._store = store
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._open: dict[RequestId, OpenStream] = {}
        self._writes: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(MAX_WRITES)
        self._writing_bytes = 0
        self._next_log_at = 0.0
        self._siblings: OtherWorkers | None = None

    def join(self, siblings: OtherWorkers) -> None:
        """Have the other workers of this port end streams that continue here, and end streams that continue there."""
        self._siblings = siblings
        siblings.handle(END_STREAM, self._end_for_sibling)

    @property
    def is_on(self) -> bool:
        return self._store is not None

    @property
    def num_writing(self) -> int:
        """Entries that are being written."""
        return len(self._writes)

    async def close(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes, timeout=WRITE_S)
        for write in list(self._writes):
            write.cancel()
        if self._store is not None:
            await self._store.close()

    # -- continuing ----------------------------------------------------------------------------------------------------------------

    async def find(self, exchange: Exchange) -> ContinuedStream | None:
        """The stream that the request's Last-Event-ID names; None: it names none. A stream that is still being sent here ends, since its
        client has plainly lost it; nothing else is changed.

        Raises InvalidRequest, UnknownStream, StreamConflict, or Unavailable where the store does not answer.
        """
        given = (exchange.header(HEADER.lower().encode()) or b"").decode("latin-1")
        if given in ("", NO_EVENT):
            return None
        event = EventId.parsed(given)
        if self._store is None:
            raise UnknownStream("This server keeps no streams (timeouts.stream_resume_s is 0).")
        began = _now()
        with self._counted():
            async with asyncio.timeout(STORE_S):
                await self._end_open(event.answer_id, exchange)
                value = await self._store.get(event.answer_id)
                if _is_elsewhere(value) and await self._has_ended_at_sibling(event.answer_id, exchange):
                    value = await self._store.get(event.answer_id)
            return replace(self._checked(event, value, exchange), waited_s=_now() - began)

    async def claim(self, stream: ContinuedStream) -> None:
        """Take the stream, right before it is continued. Raises StreamConflict where another request has taken it, or Unavailable."""
        claim = _encode(msgspec.structs.replace(stream.kept, entries=b"", state=secrets.token_bytes(CLAIM_BYTES), is_claimed=True))
        with self._counted():
            try:
                async with asyncio.timeout(STORE_S - stream.waited_s):
                    is_ours = await self._swapped(stream, claim, expected=stream.value)
            except (StoreFailed, TimeoutError, asyncio.CancelledError):
                self._in_background(len(stream.value), self._give_back(stream, claim))
                raise
            if not is_ours:
                raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
        self._metrics.continued(ContinueOutcome.CONTINUED)

    async def _swapped(self, stream: ContinuedStream, value: bytes, *, expected: bytes) -> bool:
        assert self._store is not None
        return await self._store.swap(stream.answer_id, value, expected=expected, tenant=stream.kept.tenant, ttl_s=self._ttl_s)

    async def _give_back(self, stream: ContinuedStream, claim: bytes) -> None:
        """Put the entry in the place of a claim whose request has given up. The store may get to the claim only now, so this is tried for a
        while; a claim of another request stays."""
        for pause_s in GIVE_BACK_PAUSES_S:
            if await self._swapped(stream, stream.value, expected=claim):
                return
            await asyncio.sleep(pause_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count how asking the store ends, unless it ends well; failures of the store become Unavailable."""
        try:
            yield
        except (StoreFailed, TimeoutError) as error:
            self._metrics.continued(ContinueOutcome.FAILED)
            self._warn(f"a stream could not be continued: {_reason(error)}")
            raise Unavailable("The store of streams does not answer; try again, or without Last-Event-ID.") from None
        except HeadraceError as error:
            refused = {UnknownStream: ContinueOutcome.UNKNOWN, StreamConflict: ContinueOutcome.CONFLICT}
            self._metrics.continued(refused.get(type(error), ContinueOutcome.REFUSED))
            raise

    def _checked(self, event: EventId, value: bytes | None, exchange: Exchange) -> ContinuedStream:
        kept = None if value is None else _decoded(value)
        if value is None or kept is None or kept.tenant != exchange.principal.tenant:
            raise UnknownStream(UNKNOWN, retry_after_s=BUSY_RETRY_S)
        if kept.body != exchange.body_digest:
            raise InvalidRequest(HEADER, "an event of a stream that the same body began", None, "Send the request as it was sent first.")
        if kept.is_claimed:
            raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
        stream = ContinuedStream(event.answer_id, event.number, kept, value)
        if event.number > len(stream.entries) + 1:
            raise InvalidRequest(HEADER, f"at most event {len(stream.entries) + 1} of this stream", event.number)
        return stream

    async def _end_open(self, answer_id: RequestId, exchange: Exchange) -> None:
        """Where the stream is still being sent here, end it and wait until it is kept. Its client alone may do that."""
        stream = self._open.get(answer_id)
        if stream is not None and _owner(stream.exchange) == _owner(exchange):  # else the checks that follow refuse it
            await self._give_way(stream)

    async def _give_way(self, stream: OpenStream) -> None:
        """Raises StreamConflict for a stream that has just begun."""
        if not stream.is_ended:
            if not stream.exchange.is_started or _now() - stream.begun_at < GIVE_WAY_S:
                raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
            stream.exchange.abort(ClientLeft("The client continued the stream over a newer connection."))
        await stream.closed.wait()

    async def _has_ended_at_sibling(self, answer_id: RequestId, exchange: Exchange) -> bool:
        """Whether another worker of this port was sending the stream, has ended it and has kept it. Raises StreamConflict where it has just
        begun there."""
        if self._siblings is None:
            return False
        try:
            async with asyncio.timeout(SIBLINGS_S):
                answers = await self._siblings.ask_others(END_STREAM, f"{answer_id} {_owner(exchange)}")
        except TimeoutError:
            return False
        if HAS_JUST_BEGUN in answers:
            raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
        return HAS_ENDED in answers

    async def _end_for_sibling(self, argument: str) -> bytes:
        """The answer to END_STREAM."""
        answer_id, _, owner = argument.partition(" ")
        stream = self._open.get(RequestId(answer_id))
        if stream is None or _owner(stream.exchange) != owner:
            return b""
        try:
            await self._give_way(stream)
        except StreamConflict:
            return HAS_JUST_BEGUN
        return HAS_ENDED

    # -- keeping -------------------------------------------------------------------------------------------------------------------

    def begin(self, answer_id: RequestId, exchange: Exchange) -> None:
        """The stream is being sent from here on; `keep` or `forget` ends that."""
        self._open[answer_id] = OpenStream(exchange, _now())

    def forget(self, answer_id: RequestId, *, is_claimed: bool) -> None:
        """The stream has ended and is not kept. is_claimed: it was continued, and its claim is removed"""
        if is_claimed:
            self._write(answer_id, 0, self._delete(answer_id))
        else:
            self._closed(answer_id)

    def keep(self, answer_id: RequestId, kept: KeptStream) -> None:
        """Write a stream that has ended. Returns at once."""
        value = _encode(kept)
        if self._writing_bytes + len(value) > MAX_WRITING_BYTES:
            self._closed(answer_id)
            self._lost(KeepOutcome.DROPPED, f"more than {MAX_WRITING_BYTES} bytes wait to be written")
            return
        self._write(answer_id, len(value), self._put(answer_id, kept.tenant, value))

    def _write(self, answer_id: RequestId, num_bytes: int, work: Coroutine[Any, Any, None]) -> None:
        if (stream := self._open.get(answer_id)) is not None:
            stream.is_ended = True
        self._in_background(num_bytes, work).add_done_callback(lambda _: self._closed(answer_id))

    def _in_background(self, num_bytes: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """num_bytes: that it holds until it ends"""
        self._writing_bytes += num_bytes
        write = asyncio.create_task(self._written(work))

        def end(_: asyncio.Task[None]) -> None:
            self._writing_bytes -= num_bytes
            self._writes.discard(write)

        self._writes.add(write)
        write.add_done_callback(end)
        return write

    async def _written(self, work: Coroutine[Any, Any, None]) -> None:
        async with self._turns:
            try:
                async with asyncio.timeout(WRITE_S):
                    await work
            except EntryTooLarge as error:
                self._lost(KeepOutcome.TOO_LARGE, str(error))
            except (StoreFailed, TimeoutError) as error:
                self._lost(KeepOutcome.FAILED, _reason(error))

    async def _put(self, answer_id: RequestId, tenant: str, value: bytes) -> None:
        assert self._store is not None
        await self._store.put(answer_id, value, tenant=tenant, ttl_s=self._ttl_s)
        self._metrics.kept(KeepOutcome.KEPT)

    async def _delete(self, answer_id: RequestId) -> None:
        assert self._store is not None
        await self._store.delete(answer_id)

    def _closed(self, answer_id: RequestId) -> None:
        if (stream := self._open.pop(answer_id, None)) is not None:
            stream.closed.set()

    def _lost(self, outcome: KeepOutcome, reason: str) -> None:
        self._metrics.kept(outcome)
        self._warn(f"a stream was not kept, so that its client cannot continue it: {reason}")

    def _warn(self, message: str) -> None:
        now = _now()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_EVERY_S
            log.warning("%s (at most one such line in %g s; /metrics counts all)", message, LOG_EVERY_S)


def _owner(exchange: Exchange) -> str:
    """Names the tenant and the body of a request, in hexadecimal."""
    return blake2b(exchange.principal.tenant.encode() + b"\0" + exchange.body_digest, digest_size=16).hexdigest()


def _is_elsewhere(value: bytes | None) -> bool:
    """The stream of this entry may be sent by another gateway now: nothing is kept, or it is claimed."""
    kept = None if value is None else _decoded(value)
    return value is None or (kept is not None and kept.is_claimed)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _decoded(value: bytes) -> KeptStream | None:
    """None for what another version wrote in another form."""
    try:
        kept = _decoder.decode(value)
    except msgspec.DecodeError:
        return None
    return kept if kept.form == FORM else None


def _reason(error: BaseException) -> str:
    return "the store does not answer in time" if isinstance(error, TimeoutError) else str(error)

"""Keeps event streams that ended early, so that their clients may continue them (`Last-Event-ID`).

    stream ends --keep--> store --find (checks), claim--> ContinuedStream --> `generation.run` replays its events and goes on

docs/failover.md has the rules.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import msgspec

from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.core.ids import RequestId
from headrace.gateway.http.errors import ClientLeft, SlowReader, StreamConflict, UnknownStream
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import LAST_EVENT, EventId, last_event, offsets_of
from headrace.gateway.stores.guard import Ended, GuardedStore, TooMuchToWrite, Work
from headrace.gateway.stores.lease import EntryLease
from headrace.gateway.stores.store import EntryTooLarge, StoredEntry, StoreFailed, entry_in
from headrace.gateway.upstream.generation_request import EarlierOutput
from headrace.observe.store_metrics import ContinueOutcome, KeepOutcome, ResumeMetrics

KEPT_S = 60.0
"""Seconds from a stream's end for which its client can continue it."""

GIVE_WAY_S = 1.0
"""Seconds after which a stream that is being sent gives way to a newer connection of its client. Before, the newer one gets 409."""

SIBLINGS_S = 0.15
"""A part of `stores.guard.REQUEST_WAIT_S`."""

END_STREAM = "end stream"
"""The question's argument is the stream's id and `_owner`, its answer empty where it does not send that stream."""

HAS_ENDED, HAS_JUST_BEGUN = b"ended", b"just begun"

CLAIM_BYTES = 8
"""Bytes that tell one claim from another."""

FORM = 1
"""An entry of another form is unknown."""

UNKNOWN = (
    "This server keeps no stream of yours with this id. Either another gateway still sends the stream over a connection that has broken, "
    "or the stream ended too long ago, or the id was never a stream's."
)
BUSY, BUSY_RETRY_S = "Another request continues this stream now.", 1.0


class KeptStream(StoredEntry, frozen=True):
    """The store's entry of one stream that ended early.

    body           digest of the path and the body of the stream's request
    entries        bytes of `EventLog.entries`
    is_claimed     a request continues the stream now; entries are empty, and state is random, so that no two claims are equal
    model          that answered it; empty: an earlier version of the server kept the stream
    """

    tenant: str
    body: bytes
    created: int
    num_sequences: int
    entries: bytes
    state: bytes
    is_claimed: bool = False
    model: str = ""


_encode, _decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(KeptStream)


@dataclass(frozen=True, slots=True)
class ContinuedStream:
    """A kept stream that a request may continue.

    num_seen  events that the client has
    value     bytes of the store's entry, which a claim replaces
    """

    answer_id: RequestId
    num_seen: int
    kept: KeptStream
    value: bytes

    @property
    def entries(self) -> array[int]:
        return array("i", self.kept.entries)

    @property
    def earlier(self) -> EarlierOutput:
        offsets = [0] * self.kept.num_sequences
        for index, offset in offsets_of(self.entries[: self.num_seen], self.kept.num_sequences):
            offsets[index] = offset
        return EarlierOutput(answer_id=self.answer_id, state=self.kept.state, offsets=offsets)


@dataclass(slots=True, eq=False)
class OpenStream:
    """A stream that is being sent, or written to the store.

    owner     of its client and its body: another request may continue it where its own is equal
    begun_at  on the event loop's clock
    closed    set once the stream is neither sent nor written any more
    """

    exchange: Exchange
    owner: str
    begun_at: float
    is_ended: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class OtherWorkers(Protocol):
    def handle(self, question: str, handler: Callable[[str], Awaitable[bytes]]) -> None: ...
    async def ask_others(self, question: str, argument: str) -> list[bytes]: ...


def body_digest(path: str, body: bytes, headers: Sequence[bytes] = ()) -> bytes:
    """headers: values, without zero bytes, of the headers that change the answer"""
    digest = blake2b(b"\0".join((path.encode(), *headers, b"")), digest_size=16)
    digest.update(body)
    return digest.digest()


def is_worth_keeping(error: BaseException | None) -> bool:
    """None: sent whole, but perhaps not received whole."""
    return error is None or isinstance(error, ClientLeft | SlowReader | Unavailable | asyncio.CancelledError)


class KeptStreams:
    """The open streams of one gateway, and the store of kept ones."""

    def __init__(self, store: GuardedStore, *, metrics: ResumeMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._open: dict[RequestId, OpenStream] = {}
        self._siblings: OtherWorkers | None = None

    def join(self, siblings: OtherWorkers) -> None:
        """A stream that continues at one worker is ended at the worker that still sends it."""
        self._siblings = siblings
        siblings.handle(END_STREAM, self._end_for_sibling)

    @property
    def num_writing(self) -> int:
        return self._store.num_writing

    # -- continuing ----------------------------------------------------------------------------------------------------------------

    async def find(self, exchange: Exchange, tenant: str) -> ContinuedStream | None:
        """None: the request names none. A stream that this gateway still sends is ended, since its client has lost the connection. Nothing
        else is changed.

        Raises InvalidRequest, UnknownStream, StreamConflict, or Unavailable where the store does not answer.
        """
        if (event := last_event(exchange)) is None:
            return None
        owner = _owner(exchange, tenant)
        with self._counted():
            async with self._store.guard.waiting():
                sent = self._open.get(event.answer_id)
                if sent is not None and sent.owner == owner:  # `_checked` refuses another owner
                    await self._give_way(sent)
                value = await self._store.store.get(event.answer_id)
                kept = entry_in(value, _decoder, FORM)
                is_elsewhere = value is None or (kept is not None and kept.is_claimed)
                if is_elsewhere and await self._has_ended_at_sibling(event.answer_id, owner):
                    value = await self._store.store.get(event.answer_id)
            return self._checked(event, value, exchange, tenant)

    async def claim(self, stream: ContinuedStream) -> None:
        """Raises StreamConflict when another request has claimed the stream, or Unavailable."""
        claimed = _encode(msgspec.structs.replace(stream.kept, entries=b"", state=secrets.token_bytes(CLAIM_BYTES), is_claimed=True))
        lease = EntryLease(self._store, stream.answer_id, claimed, tenant=stream.kept.tenant, lasts_s=KEPT_S)
        with self._counted():
            try:
                is_ours = await self._store.asked(lambda store: lease.claim(store, expected=stream.value))
            except (StoreFailed, asyncio.CancelledError):
                self._store.write(lambda store: lease.give_back(store, stream.value), len(stream.value), lambda _: None)
                raise
            if not is_ours:
                raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
        self._metrics.continued(ContinueOutcome.CONTINUED)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Raises Unavailable for a failure of the store."""
        try:
            yield
        except StoreFailed:
            self._metrics.continued(ContinueOutcome.FAILED)
            raise Unavailable("The store of streams does not answer; try again, or without Last-Event-ID.") from None
        except HeadraceError as error:
            refused: dict[type[HeadraceError], ContinueOutcome] = {
                UnknownStream: ContinueOutcome.UNKNOWN,
                StreamConflict: ContinueOutcome.CONFLICT,
            }
            self._metrics.continued(refused.get(type(error), ContinueOutcome.REFUSED))
            raise

    def _checked(self, event: EventId, value: bytes | None, exchange: Exchange, tenant: str) -> ContinuedStream:
        kept = entry_in(value, _decoder, FORM)
        if value is None or kept is None or kept.tenant != tenant:
            raise UnknownStream(UNKNOWN, retry_after_s=BUSY_RETRY_S)
        if kept.body != exchange.body_digest:
            raise InvalidRequest(
                LAST_EVENT, "an event of a stream that the same body began", None, "Send the request as it was sent first."
            )
        if kept.is_claimed:
            raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
        stream = ContinuedStream(event.answer_id, event.number, kept, value)
        if event.number > len(stream.entries) + 1:
            raise InvalidRequest(LAST_EVENT, f"at most event {len(stream.entries) + 1} of this stream", event.number)
        return stream

    async def _give_way(self, stream: OpenStream) -> None:
        """Raises StreamConflict for a stream that has just begun."""
        if not stream.is_ended:
            if not stream.exchange.status or _now() - stream.begun_at < GIVE_WAY_S:
                raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
            stream.exchange.abort(ClientLeft("The client continued the stream over a newer connection."))
        await stream.closed.wait()

    async def _has_ended_at_sibling(self, answer_id: RequestId, owner: str) -> bool:
        """True: another worker of this port sent the stream, has ended it and has kept it.

        Raises StreamConflict when the stream has just begun there.
        """
        if self._siblings is None:
            return False
        try:
            async with asyncio.timeout(SIBLINGS_S):
                answers = await self._siblings.ask_others(END_STREAM, f"{answer_id} {owner}")
        except TimeoutError:
            return False
        if HAS_JUST_BEGUN in answers:
            raise StreamConflict(BUSY, retry_after_s=BUSY_RETRY_S)
        return HAS_ENDED in answers

    async def _end_for_sibling(self, argument: str) -> bytes:
        answer_id, _, owner = argument.partition(" ")
        stream = self._open.get(RequestId(answer_id))
        if stream is None or stream.owner != owner:
            return b""
        try:
            await self._give_way(stream)
        except StreamConflict:
            return HAS_JUST_BEGUN
        return HAS_ENDED

    # -- keeping -------------------------------------------------------------------------------------------------------------------

    def begin(self, answer_id: RequestId, exchange: Exchange, tenant: str) -> None:
        self._open[answer_id] = OpenStream(exchange, _owner(exchange, tenant), _now())

    def forget(self, answer_id: RequestId, *, is_claimed: bool) -> None:
        """is_claimed: the claim in the store is removed"""
        if is_claimed:
            self._write(answer_id, 0, lambda store: store.delete(answer_id), lambda _: None)
        else:
            self._closed(answer_id)

    def keep(self, answer_id: RequestId, kept: KeptStream) -> None:
        """Returns at once; the store is written in the background."""
        value = _encode(kept)
        self._write(
            answer_id,
            len(value),
            lambda store: store.put(answer_id, value, tenant=kept.tenant, ttl_s=KEPT_S),
            lambda failure: self._metrics.kept(_outcome(failure)),
        )

    def _write(self, answer_id: RequestId, num_bytes: int, work: Work, count: Ended) -> None:
        if (stream := self._open.get(answer_id)) is not None:
            stream.is_ended = True

        def ended(failure: StoreFailed | None) -> None:
            count(failure)
            self._closed(answer_id)

        self._store.write(work, num_bytes, ended)

    def _closed(self, answer_id: RequestId) -> None:
        if (stream := self._open.pop(answer_id, None)) is not None:
            stream.closed.set()


def _owner(exchange: Exchange, tenant: str) -> str:
    return blake2b(tenant.encode() + b"\0" + exchange.body_digest, digest_size=16).hexdigest()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _outcome(failure: StoreFailed | None) -> KeepOutcome:
    if failure is None:
        return KeepOutcome.KEPT
    outcomes = {EntryTooLarge: KeepOutcome.TOO_LARGE, TooMuchToWrite: KeepOutcome.DROPPED}
    return outcomes.get(type(failure), KeepOutcome.FAILED)

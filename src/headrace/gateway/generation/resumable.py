"""One request's part in streams that clients may continue: which one it continues, the numbers of its events, and keeping it at its end.

`generation.run` calls this in order: `find`, `open_log`, `claim`, `sending` around everything that is sent, `replay` before the first new
event. Every call does nothing where the client did not send `Last-Event-ID`, the server keeps no streams, or the answer is not a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from headrace.core.errors import InvalidRequest, Unavailable
from headrace.gateway.generation.event_log import HEADER, LAST_EVENT_ID, EventLog, places_of
from headrace.gateway.generation.kept_streams import FORM, ContinuedStream, KeptStream, is_worth_keeping
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import StreamConflict
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import SseStream
from headrace.gateway.upstream.generation_request import EarlierOutput
from headrace.gateway.upstream.output_events import OutputEvent
from headrace.gateway.upstream.seam import EventStream, Prepared

REPLAY_STEP = 64
"""Events of a replay after which other requests have their turn: each takes about 10 us."""

_NOTHING_KEPT = nullcontext()


class EventEncoder(Protocol):
    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]: ...


class ResumableStream:
    """
    answer_id, created  of the answer: the id of the request that began it, and when that was in Unix seconds
    event_log           None where the client cannot continue the stream, so that its events have no ids
    """

    def __init__(self, service: Service, exchange: Exchange, *, has_logprobs: bool) -> None:
        """has_logprobs: its events cannot be made from ids alone"""
        self._kept_streams = service.kept_streams
        self._exchange = exchange
        self._has_logprobs = has_logprobs
        self._continued: ContinuedStream | None = None
        self._is_replayed = False
        self._num_sequences = 0
        self._wants_ids = exchange.header(LAST_EVENT_ID) is not None
        self.answer_id = exchange.request_id
        self.created = int(service.unix_time())
        self.event_log: EventLog | None = None

    async def find(self, *, is_streaming: bool) -> EarlierOutput | None:
        """The output of the stream that this request continues; None: it begins one. Raises what `KeptStreams.find` raises."""
        if not self._wants_ids:
            return None
        if not is_streaming and self._exchange.header(LAST_EVENT_ID):
            raise InvalidRequest(HEADER, "stream = true in the body", None, "An answer that is not streamed has no events.")
        self._continued = found = await self._kept_streams.find(self._exchange)
        if found is None:
            return None
        self.answer_id, self.created = found.answer_id, found.kept.created
        self._exchange.record.continued_id = found.answer_id
        return found.earlier

    def open_log(self, prepared: Prepared, *, is_streaming: bool) -> None:
        """Raises StreamConflict for a stream that goes on nowhere."""
        self._num_sequences = prepared.num_sequences
        if self._wants_ids and self._kept_streams.is_on and is_streaming and prepared.keeps_events:
            num_seen = 0 if self._continued is None else self._continued.num_seen
            self.event_log = EventLog(self.answer_id, prepared.num_sequences, num_seen=num_seen)
        elif self._continued is not None:
            raise StreamConflict("The model of this stream is answered by another server now, which cannot continue it.")

    def turn_off(self) -> None:
        """Give the events no ids: another model than the one that was asked for answers, and may not do so the next time."""
        self._wants_ids = False

    @property
    def is_continued(self) -> bool:
        """The request continues a stream: its answer begins at once, with what the client lacks."""
        return self._continued is not None

    async def claim(self) -> None:
        if self._continued is not None:
            await self._kept_streams.claim(self._continued)

    def sending(self, stream: EventStream) -> AbstractContextManager[None]:
        """However the block ends, the stream is kept if its client may want the rest of it."""
        return _NOTHING_KEPT if self.event_log is None else self._kept_at_end(stream)

    @contextmanager
    def _kept_at_end(self, stream: EventStream) -> Iterator[None]:
        self._kept_streams.begin(self.answer_id, self._exchange)
        try:
            yield
        except BaseException as error:
            self._end(stream, error)
            raise
        self._end(stream, None)

    async def replay(
        self,
        encoder: EventEncoder,
        stream: EventStream,
        progress: RequestProgress,
        sse: SseStream,
        *,
        record: Callable[[Sequence[OutputEvent]], None],
    ) -> None:
        """Make the events of the earlier stream again, and send what the client lacks of them. record: gets them all"""
        if self._continued is None or self.event_log is None:
            return
        entries, num_seen = self._continued.entries, self._continued.num_seen
        if self._has_logprobs:
            entries = entries[:num_seen]
        for number, (index, place) in enumerate(places_of(entries, self._num_sequences), start=1):
            event = stream.replay(index, place)
            progress.record_replayed(event)
            record((event,))
            made = b"".join(encoder.encode_events((event,)))
            if not self._has_logprobs and self.event_log.entries != entries[:number]:
                raise Unavailable("This stream cannot be continued by this version of the server; it can be sent again.")
            if number > num_seen:
                await sse.write(made)
            elif number % REPLAY_STEP == 0:
                await asyncio.sleep(0)
        self.event_log.entries[:] = entries
        self._is_replayed = True

    def _end(self, stream: EventStream, error: BaseException | None) -> None:
        kept = self._kept(stream) if is_worth_keeping(error) else None
        if kept is None:
            self._kept_streams.forget(self.answer_id, is_claimed=self._continued is not None)
        else:
            self._kept_streams.keep(self.answer_id, kept)

    def _kept(self, stream: EventStream) -> KeptStream | None:
        """What the store gets. None: there is nothing to continue."""
        if self._continued is not None and not self._is_replayed:
            return self._continued.kept
        state = stream.saved_state()
        if state is None or self.event_log is None or not self.event_log.entries:
            return None
        return KeptStream(
            form=FORM,
            tenant=self._exchange.principal.tenant_key,
            body=self._exchange.body_digest,
            created=self.created,
            num_sequences=self._num_sequences,
            entries=self.event_log.entries.tobytes(),
            state=state,
        )

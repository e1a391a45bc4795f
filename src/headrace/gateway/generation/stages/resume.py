"""Lets clients continue streams.

Nothing happens where the client did not send `Last-Event-ID`, or the answer is not a stream.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from types import TracebackType

from headrace.core.errors import InvalidRequest, ModelNotFound, Unavailable
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.generation.answer_encoder import AnswerEncoder, RecordEvents
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.kept_streams import FORM, ContinuedStream, KeptStream, KeptStreams, is_worth_keeping
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.http.errors import StreamConflict
from headrace.gateway.http.sse import LAST_EVENT, LAST_EVENT_ID, EventLog, SseStream, offsets_of
from headrace.gateway.upstream.seam import EventStream
from headrace.observe.finished_request import ModelStep

REPLAY_STEP = 64
"""Other requests have their turn then: each event takes about 10 us."""


async def resume(call: Call, call_next: CallNext, *, kept_streams: KeptStreams, open_requests: OpenRequests) -> Ready:
    """Raises InvalidRequest, UnknownStream when the stream is not kept, StreamConflict when another request continues it or no server of
    the model can, and Unavailable.
    """
    exchange, is_streaming = call.exchange, call.parsed.is_streaming
    if (last_event := exchange.header(LAST_EVENT_ID)) is None:
        return await call_next(call)
    if not is_streaming and last_event:
        raise InvalidRequest(LAST_EVENT, "stream = true in the body", None, "An answer that is not streamed has no events.")
    continued = await kept_streams.find(exchange, call.principal.tenant_key)
    if continued is not None:
        call = call.changed(earlier=continued.earlier, answer_id=continued.answer_id, created=continued.kept.created)
        call.ending.continued_id = continued.answer_id
        if continued.kept.model not in ("", call.model.name):
            call = _of_model(call, continued.kept.model)
            open_requests.use(exchange.request_id, call.principal.tenant, call.model.users)
    ready = await call_next(call)
    has_ids = ready.call.model is call.asked  # another one may not answer the next time
    if not (has_ids and is_streaming and ready.prepared.keeps_events):
        if continued is not None:
            raise StreamConflict("The model of this stream is answered by another server now, which cannot continue it.")
        return ready
    num_seen = 0 if continued is None else continued.num_seen
    event_log = EventLog(call.answer_id, ready.prepared.num_sequences, num_seen=num_seen)
    stream = ResumableStream(call, kept_streams, continued, event_log)
    if continued is not None:
        await kept_streams.claim(continued)
    kept_streams.begin(call.answer_id, exchange, call.principal.tenant_key)
    call.ending.ends.push(stream.end)
    return ready.changed(event_log=event_log, replay=None if continued is None else stream.replay)


def _of_model(call: Call, name: str) -> Call:
    """A route may have led the same request to another model now, and another key may have begun the stream. Raises StreamConflict."""
    try:
        model = call.models.usable_by(call.principal).reached(name, call.parsed.model)
    except ModelNotFound:
        raise StreamConflict("The model of this stream is not served any more, or not for this key; send the request again.") from None
    call.ending.steps = [ModelStep(name, True, "it began the stream that this request continues")]
    return call.answered_by(model).changed(asked=model)


class ResumableStream:
    """continued: None: a new stream"""

    def __init__(self, call: Call, kept_streams: KeptStreams, continued: ContinuedStream | None, event_log: EventLog) -> None:
        self._call, self._kept_streams, self._continued, self._event_log = call, kept_streams, continued, event_log
        self._is_replayed = continued is None

    async def replay(
        self, stream: EventStream, progress: RequestProgress, encoder: AnswerEncoder, sse: SseStream, record: RecordEvents
    ) -> None:
        assert self._continued is not None
        entries, num_seen = self._continued.entries, self._continued.num_seen
        has_logprobs = self._call.params.logprobs is not None
        number = 0
        for (index, offset), same in groupby(offsets_of(entries, progress.num_sequences)):
            if has_logprobs and number >= num_seen:  # events that cannot be made from ids alone
                break
            num_seen_of_these = max(0, num_seen - number)
            number += len(list(same))
            event = stream.replay(index, offset)
            progress.record_replayed(event)
            record((event,))
            made = b"".join(encoder.encode_events((event,)))
            if not has_logprobs and self._event_log.entries != entries[:number]:
                raise Unavailable("This stream cannot be continued by this version of the server; it can be sent again.")
            if number > num_seen:  # a chunk ends with an empty line
                await sse.write(made.split(b"\n\n", num_seen_of_these)[-1])
            elif number % REPLAY_STEP == 0:
                await asyncio.sleep(0)
        self._event_log.entries[:] = entries[:number]
        self._is_replayed = True

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        kept_streams, answer_id = self._kept_streams, self._call.answer_id
        kept = self._kept() if is_worth_keeping(error) else None
        if kept is None:
            kept_streams.forget(answer_id, is_claimed=self._continued is not None)
        else:
            kept_streams.keep(answer_id, kept)

    def _kept(self) -> KeptStream | None:
        """None: it cannot be continued, or has no event yet."""
        call, log = self._call, self._event_log
        if self._continued is not None and not self._is_replayed:
            return self._continued.kept
        stream = call.ending.stream
        state = None if stream is None or call.ending.model is not call.asked else stream.saved_state()
        if state is None or not log.entries:
            return None
        return KeptStream(
            form=FORM,
            tenant=call.principal.tenant_key,
            body=call.exchange.body_digest,
            created=call.created,
            num_sequences=log.num_sequences,
            entries=log.entries.tobytes(),
            state=state,
            model=call.model.name,
        )

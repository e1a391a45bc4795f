"""Runs one admitted request, from the parsed body to the last byte of its answer.

    ParsedRequest -> stages -> Upstream.prepare -> events -> chunks or one answer -> ends

A surface parses the body into a `ParsedRequest` and makes a `Generation` of it. It calls `generate` with a function that makes the
`AnswerEncoder`, which turns events into the surface's own JSON. Encoding runs in the request's own task. `DirectChunkWriter` is the
exception: the task that reads from the upstream calls it while the request's task waits (both in `answer_encoder`). `Exchange.end` ends an
answer early: it cancels the event stream, and the request's task unwinds. `Generation.ends` runs once, however the request ends.

A chunk is one server-sent event of an answer. A page is up to 64 tokens whose log-probabilities are encoded together. A piece is what an
encoder yields at a time, a page's JSON at most. A slice is the pieces of one turn of `answer_encoder.EncodingTurns`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial

from headrace.core.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.gateway.generation.answer_encoder import AnswerEncoder, DirectChunkWriter
from headrace.gateway.generation.generation import Generation
from headrace.gateway.generation.progress import DEADLINE_PASSED, RequestProgress, raise_if_failed, record_end
from headrace.gateway.generation.stages import STAGES
from headrace.gateway.generation.stages.fitting import prepare
from headrace.gateway.http.sse import SseStream
from headrace.gateway.upstream.seam import NO_USAGE, OutputEvent, Prepared, added

DEADLINE_GRACE_S = 0.5
"""The engine ends a request at its deadline. The gateway ends a request that still runs this many seconds later."""


async def generate(generation: Generation, encoder_of: Callable[[Prepared], AnswerEncoder]) -> None:
    """Answer a request. Raises the HeadraceError by which a stage or the upstream refuses it, or which ends the answer early."""
    exchange = generation.exchange
    async with exchange.watching(), generation.ends:
        prepared = await exchange.unless_ended(_prepared(generation, 0))
        await _Answer(generation, encoder_of(prepared), prepared).write()


async def _prepared(generation: Generation, stage: int) -> Prepared:
    """The request, prepared by the stages from number `stage` on."""
    if stage < len(STAGES):
        return await STAGES[stage](generation, partial(_prepared, generation, stage + 1))
    return await prepare(generation)


class _Answer:
    """Writes the events of a prepared request as its answer."""

    def __init__(self, generation: Generation, encoder: AnswerEncoder, prepared: Prepared) -> None:
        self.generation, self.encoder = generation, encoder
        self.service, self.exchange, self.memory = generation.service, generation.exchange, generation.memory
        self._raise_if_ended()
        self.deadline_timer = self._start_deadline_timer()
        self.stream = generation.stream = prepared.stream()
        self.progress = RequestProgress(
            self.stream,
            num_sequences=prepared.num_sequences,
            arrived_at=self.exchange.arrived_at,
            instruments=partial(self.service.metrics.replica, generation.model.name),
        )

    async def write(self) -> None:
        stream, outlives_client = self.stream, self.generation.outlives_client
        try:
            self.exchange.on_ended(lambda: None if outlives_client() else stream.cancel())
            if self.generation.parsed.is_streaming:
                await self._stream()
            else:
                await self._whole()
        finally:
            stream.listen(None)  # nothing is written any more, and the stream and its listener are in no cycle
            if self.deadline_timer is not None:
                self.deadline_timer.cancel()
            if outlives_client():
                await self._read_to_end()
            await stream.close()
            self._close()

    def _start_deadline_timer(self) -> asyncio.TimerHandle | None:
        """A timer that ends the request when a hanging engine does not. None: the request has no deadline."""
        deadline_at = self.generation.deadline_at
        if deadline_at is None:
            return None
        remaining_s = deadline_at - self.service.clock()
        return asyncio.get_running_loop().call_later(remaining_s + DEADLINE_GRACE_S, self.exchange.end, DeadlineExceeded(DEADLINE_PASSED))

    async def _whole(self) -> None:
        while events := await self._events():
            self.encoder.add(events)
            self.memory.collect(events)
        await self._before_end()
        pieces = self.encoder.encode_body(self.stream.usage())
        if self.memory.is_whole_inline:
            await self.exchange.reply(200, b"".join(pieces))
        else:
            await self.exchange.reply_in_pieces(self._slices(pieces))

    async def _slices(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """Encodes `pieces` in slices, as they are sent. Raises `end_reason` when the answer has ended early."""
        async with aclosing(self.service.encoding.slices(pieces)) as slices:
            async for made in slices:
                self._raise_if_ended()
                yield made

    async def _stream(self) -> None:
        """Write a stream. Response headers wait for the first event, for at most `sse_ping_s`, so that a refusal has its own status."""
        generation, stream, encoder, progress = self.generation, self.stream, self.encoder, self.progress
        first: list[OutputEvent] | None = None
        if generation.replay is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.service.config.timeouts.sse_ping_s):
                    first = await self._events()
        logprob_bytes = self.memory.unread_logprob_bytes
        async with self.service.watch.open(self.exchange, lambda: stream.unread_bytes, logprob_bytes=logprob_bytes) as sse:
            if generation.replay is not None:
                await generation.replay(stream, progress, encoder, sse)
            events = first if first is not None else await self._events()
            if self.memory.is_inline(()):
                record = generation.record_events if generation.recorders else None
                stream.listen(DirectChunkWriter(encoder, progress, sse, self.service.clock, record))
            while events:
                await self._write(events, sse)
                events = await self._events()
            stream.listen(None)
            await self._before_end()
            await sse.end(encoder.encode_end(stream.usage()))

    async def _write(self, events: Sequence[OutputEvent], sse: SseStream) -> None:
        if self.memory.is_inline(events):
            if made := b"".join(self.encoder.encode_events(events)):
                await sse.write(made)
        else:
            await sse.write_slices(self._slices(self.encoder.encode_events(events)), num_bytes=sum([event.num_bytes for event in events]))

    async def _events(self) -> list[OutputEvent]:
        """The next events; empty once every sequence has finished. Raises a HeadraceError if the request ended without an answer."""
        self._raise_if_ended()
        events = await self.stream.events()
        self.generation.record_events(events)
        self._raise_if_ended()
        self.progress.record(events, self.service.clock())
        for event in events:
            if event.finish is not None:
                raise_if_failed(event.finish, event.error, self.exchange.record)
        if not events and len(self.progress.finish_reasons) < self.progress.num_sequences:
            raise Unavailable("The engine ended this request before it was complete; it can be sent again.")
        return events

    async def _read_to_end(self) -> None:
        """Record the rest of an answer whose client has left, for the client's retry."""
        with suppress(HeadraceError):
            while events := await self.stream.events():
                self.progress.record(events, self.service.clock())
                self.generation.record_events(events)
            if self.progress.is_whole:
                await self._before_end()

    async def _before_end(self) -> None:
        """Run the `before_end` hooks. Raises a hook's error."""
        hooks, self.generation.before_end = self.generation.before_end, []
        try:
            for hook in hooks:
                await hook(self.stream.facts(0).replica)
        except BaseException:
            self.generation.is_refused_at_end = True
            raise

    def _raise_if_ended(self) -> None:
        if self.exchange.end_reason is not None:
            raise self.exchange.end_reason

    def _close(self) -> None:
        """Write usage, times and finish reasons to the request's record, and observe the metrics."""
        generation, progress, stream, record = self.generation, self.progress, self.stream, self.exchange.record
        has_run = progress.ttft_s is not None or bool(progress.finish_reasons) or self.exchange.end_reason is not None
        if has_run and record.cache_tier is None:
            generation.used = stream.usage()
        side = generation.side_usage
        usage = stream.usage() if side is None else added(side, generation.used or NO_USAGE)
        record_end(record, stream, progress, usage)
        if stream.num_resumes:
            self.service.metrics.sequences_resumed.labels(generation.model.name, record.replica or "").inc(stream.num_resumes)
        progress.close(self.service.clock(), n=generation.client_params.n)

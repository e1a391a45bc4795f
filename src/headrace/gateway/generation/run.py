"""Runs one admitted request, from the parsed body to the last byte of its answer.

    ParsedRequest -> Call -> stages -> Upstream.prepare -> Ready -> events -> chunks or one answer -> ends

Encoding runs in the request's own task, or in that of the upstream (`answer_encoder.DirectChunkWriter`). `Exchange.end` ends an answer
early: it cancels the event stream. `Ending.ends` runs once, however the request ends.

A chunk is one server-sent event of an answer. A page is up to 64 tokens whose log-probabilities are encoded together. A piece is what an
encoder yields at a time, a page's JSON at most. A slice is the pieces of one turn of `answer_encoder.EncodingTurns`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cached_property, partial

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.gateway.generation.account import Ending
from headrace.gateway.generation.answer_encoder import AnswerEncoder, DirectChunkWriter, EncodingTurns
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.progress import DEADLINE_PASSED, RequestProgress, is_charged, raise_if_failed
from headrace.gateway.generation.shadows import ShadowCopies
from headrace.gateway.http.sse import SseStream, StreamWatch
from headrace.gateway.upstream.fallback import FallbackStream
from headrace.gateway.upstream.seam import NO_USAGE, EventStream, OutputEvent, Prepared, TokenUsage
from headrace.observe.finished_request import MAX_DETAIL_CHARS, Answered, AnswerHandling, Charged, PromptMiss, Times, Usage
from headrace.observe.metrics import Metrics, ReplicaMetrics
from headrace.observe.timeline import ANSWER, CLOSE, REPLAY

DEADLINE_GRACE_S = 0.5
"""The gateway ends a request that its engine has not ended this many seconds after its deadline."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Runs generating requests: through the stages, then to the end of their answers."""

    stages: CallNext
    watch: StreamWatch
    encoding: EncodingTurns
    shadows: ShadowCopies
    metrics: Metrics
    clock: Clock

    async def run(self, call: Call, encoder_of: Callable[[Ready], AnswerEncoder]) -> None:
        """Raises the HeadraceError by which a stage or the upstream refuses it, or which ends the answer early."""
        exchange, ending = call.exchange, call.ending
        answer: _Answer | None = None
        ready: Ready | None = None
        try:
            async with exchange.watching(), ending.ends:
                ready = await exchange.unless_ended(self.stages(call))
                exchange.marks.enter(ANSWER)
                self.shadows.send(ready)
                ending.ends.callback(exchange.marks.enter, CLOSE)
                answer = _Answer(self, ready, encoder_of)
                await answer.write()
        finally:
            call.account.answered = _answered(call, ready if answer is None else answer.ready, answer)


def _answered(call: Call, ready: Ready | None, answer: _Answer | None) -> Answered:
    """ready: None: a stage or the upstream refused it; answer: None: none has begun"""
    ending, counted = call.ending, call.reservation.counted
    answered_with = ending.prepared if ready is None else ready.prepared
    replica = num_resumes = finish_reasons = failure = None
    times = Times()
    if answer is not None:
        stream, progress = answer.stream, answer.progress
        replica, num_resumes, times, failure = stream.facts(0).replica, stream.num_resumes or None, progress.times(), progress.failure
        finish_reasons = tuple(progress.finish_reasons) or None
    return Answered(
        model=ending.model.base_name,
        adapter=ending.model.adapter,
        version=ending.version,
        replica=replica,
        continued_id=ending.continued_id,
        num_resumes=num_resumes,
        cache_tier=None if ready is None else ready.cache_tier,
        finish_reasons=finish_reasons,
        seed=None if answered_with is None else answered_with.seed,
        usage=_usage(ending, counted, answer),
        charged=Charged(*counted[:3], counted.estimated_tokens, call.reservation.used.nanos),
        times=times,
        failure=failure,
        prompt_blocks=_prompt_blocks(call, answered_with) if call.config.log_prompt_blocks else None,
        handling=AnswerHandling() if answer is None else answer.stream.handling().bounded(),
        miss=None if answer is None or answered_with is None else _miss(answer.stream, answered_with),
        limits=call.reservation.limits_used(),
        models=tuple(ending.steps),
    )


def _usage(ending: Ending, counted: TokenUsage, answer: _Answer | None) -> Usage:
    """Includes a cache's answer and a failed one, which cost nothing, and not the output that a continued stream began with."""
    if ending.has_summary:
        usage = counted
    elif answer is None:
        return Usage(None if ending.prepared is None else ending.prepared.prompt_tokens)
    else:
        usage = NO_USAGE if ending.is_free else ending.usage()
    return Usage(usage.prompt_tokens, usage.charged.completion_tokens, usage.cached_tokens, usage.estimated_tokens or None)


def _miss(stream: EventStream, prepared: Prepared) -> PromptMiss | None:
    """None: all of the first prompt was cached, or its engine does not say."""
    miss = stream.facts(0).cache_miss
    return None if miss is None else PromptMiss(miss.at_token, miss.reason, prepared.prompts[0].part_at(miss.at_token))


def _prompt_blocks(call: Call, answered_with: Prepared | None) -> str | None:
    if answered_with is None or len(answered_with.prompts) != 1:
        return None
    return answered_with.prompts[0].recorded_blocks(call.salt) or None


def _instruments(metrics: Metrics, ending: Ending, replica: str) -> ReplicaMetrics:
    return metrics.replica(ending.model.base_name, replica)


class _Answer:
    """Writes one prepared request's answer, streamed or whole, and closes its stream.

    ready  of the model that answers: until the first output another one may follow
    """

    def __init__(self, pipeline: Pipeline, ready: Ready, encoder_of: Callable[[Ready], AnswerEncoder]) -> None:
        call = ready.call
        self.pipeline, self.ready, self.encoder_of = pipeline, ready, encoder_of
        self.exchange, self.memory, self.clock = call.exchange, call.memory, pipeline.clock
        self.hooks = ready.before_end
        self._raise_if_ended()
        self.deadline_timer = self._start_deadline_timer()
        self.stream: EventStream = ready.prepared.stream()
        if ready.following is not None:
            self.stream = FallbackStream(self.stream, self._following, num_sequences=ready.prepared.num_sequences)
        call.ending.stream = self.stream
        self.progress = RequestProgress(
            self.stream,
            num_sequences=ready.prepared.num_sequences,
            arrived_at=self.exchange.arrived_at,
            instruments=partial(_instruments, pipeline.metrics, call.ending),
        )

    @property
    def call(self) -> Call:
        return self.ready.call

    @cached_property
    def encoder(self) -> AnswerEncoder:
        """Made with the first events: it shows the model that answers."""
        return self.encoder_of(self.ready)

    async def _following(self, error: HeadraceError) -> EventStream:
        """The events of another model have no ids, since it may not answer the next time."""
        assert self.ready.following is not None
        ready = await self.ready.following(error)
        self.ready = self.ready.changed(
            call=ready.call, prepared=ready.prepared, fitted=ready.fitted, following=ready.following, event_log=None
        )
        return ready.prepared.stream()

    async def write(self) -> None:
        stream, outlives_client = self.stream, self.ready.outlives_client
        try:
            self.exchange.on_ended(lambda: None if outlives_client() else stream.cancel())
            if self.call.parsed.is_streaming:
                await self._stream()
            else:
                await self._whole()
        finally:
            stream.listen(None)  # nothing is written any more, and the stream and its listener are in no cycle
            if self.deadline_timer is not None:
                self.deadline_timer.cancel()
            try:
                if outlives_client():
                    await self._read_to_end()
            finally:  # what ran is counted and billed, also where a shutdown cancels this
                await stream.close()
                self._count_use()

    def _start_deadline_timer(self) -> asyncio.TimerHandle | None:
        """Ends the request when a hanging engine does not."""
        remaining_s = self.call.remaining_s(self.clock)
        if remaining_s is None:
            return None
        return asyncio.get_running_loop().call_later(remaining_s + DEADLINE_GRACE_S, self.exchange.end, DeadlineExceeded(DEADLINE_PASSED))

    async def _whole(self) -> None:
        while events := await self._events():
            self.encoder.add(events)
            self.memory.collect(events)
        await self._before_end()
        pieces = self.encoder.encode_body(self.call.ending.usage())
        if self.memory.is_whole_inline:
            await self.exchange.reply(200, b"".join(pieces))
        else:
            await self.exchange.reply_in_pieces(self._slices(pieces))

    async def _slices(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """Raises `end_reason` when the answer has ended early."""
        async with aclosing(self.pipeline.encoding.slices(pieces)) as slices:
            async for made in slices:
                self._raise_if_ended()
                yield made

    async def _stream(self) -> None:
        """Response headers wait for the first event, for at most PING_S, so that a refusal has its own status."""
        stream, progress, replay = self.stream, self.progress, self.ready.replay
        first: list[OutputEvent] | None = None
        if replay is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.pipeline.watch.ping_s):
                    first = await self._events()
        logprob_bytes = self.memory.unread_logprob_bytes
        async with self.pipeline.watch.open(self.exchange, lambda: stream.unread_bytes, logprob_bytes=logprob_bytes) as sse:
            if replay is not None:
                self.exchange.marks.enter(REPLAY)
                await replay(stream, progress, self.encoder, sse, self._record)
                self.exchange.marks.enter(ANSWER)
            events = first if first is not None else await self._events()
            if self.memory.is_plain_inline:
                record = self._record if self.ready.recorders else None
                stream.listen(DirectChunkWriter(self.encoder, progress, sse, self.clock, record))
            while events:
                await self._write(events, sse)
                events = await self._events()
            stream.listen(None)
            await self._before_end()
            await sse.end(self.encoder.encode_end(self.call.ending.usage()))

    async def _write(self, events: Sequence[OutputEvent], sse: SseStream) -> None:
        if self.memory.is_inline(events):
            if made := b"".join(self.encoder.encode_events(events)):
                await sse.write(made)
        else:
            await sse.write_slices(self._slices(self.encoder.encode_events(events)), num_bytes=sum([event.num_bytes for event in events]))

    async def _events(self) -> list[OutputEvent]:
        """Empty once every sequence has finished. Raises a HeadraceError if the request ended without an answer."""
        self._raise_if_ended()
        events = await self.stream.events()
        self.progress.record(events, self.clock())
        self._record(events)
        self._raise_if_ended()
        for event in events:
            if event.finish is not None:
                self.progress.failure = event.error and event.error[:MAX_DETAIL_CHARS]
                raise_if_failed(event.finish, event.error)
        if not events and len(self.progress.finish_reasons) < self.progress.num_sequences:
            raise Unavailable("The engine ended this request before it was complete; it can be sent again.")
        return events

    def _record(self, events: Sequence[OutputEvent]) -> None:
        for recorder in self.ready.recorders:
            recorder.add(events)

    async def _read_to_end(self) -> None:
        with suppress(HeadraceError):
            while events := await self.stream.events():
                self.progress.record(events, self.clock())
                self._record(events)
            if self.progress.is_whole:
                await self._before_end()

    async def _before_end(self) -> None:
        hooks, self.hooks = self.hooks, ()
        try:
            for hook in hooks:
                await hook(self.ready)
        except BaseException as error:
            ending = self.call.ending
            ending.is_refused_at_end, ending.is_free = True, isinstance(error, Unavailable)
            raise

    def _raise_if_ended(self) -> None:
        if self.exchange.end_reason is not None:
            raise self.exchange.end_reason

    def _count_use(self) -> None:
        call, progress, stream = self.call, self.progress, self.stream
        is_counted = is_charged(self.exchange.end_reason, has_run=progress.has_run)
        if is_counted and self.ready.cache_tier is None and not call.ending.is_free:
            call.ending.used, used = call.ending.usage(), stream.usage()
            if progress.is_whole and call.earlier is None:
                means = call.ending.model.means
                means.add(prompt_tokens=used.prompt_tokens, cached_tokens=used.cached_tokens, tpot_s=progress.tpot_s)
        if stream.num_resumes:
            resumed = self.pipeline.metrics.sequences_resumed.labels(call.model.base_name, stream.facts(0).replica or "")
            resumed.inc(stream.num_resumes)
        progress.close(self.clock(), n=call.params.n)

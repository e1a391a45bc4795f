"""One admitted request, from what its surface asks for to the last byte of its answer.

    ParsedRequest -> Upstream.prepare -> limits -> events -> chunks or one answer -> close

A surface (`surfaces.chat`, `surfaces.completions`) parses the body into a `ParsedRequest`, makes a `Generation` of it, awaits `prepare`,
then `answer` with the `AnswerEncoder` that turns events into its own JSON. This runs in the request's own task, except for
`DirectChunkWriter` (both in `answer_encoder`), which the task that reads from the upstream calls while the request's task waits. When the
answer ends early (`Exchange.end`), the event stream is cancelled; the task then finds it ended and unwinds. Once an event stream exists,
`Generation._close` runs once, however the request ends.

A chunk is one server-sent event of an answer. A page is up to 64 tokens whose log-probabilities are encoded together. A piece is what an
encoder yields at a time, a page's JSON at most. A slice is the pieces of one turn of `encoding.EncodingTurns`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial

from headrace.core.errors import (
    DeadlineBeforeStart,
    DeadlineExceeded,
    HeadraceError,
    ModelNotFound,
    Unavailable,
)
from headrace.core.sampling import SamplingParams
from headrace.gateway.access.admission import ModelBusy, admitted_model, headers_of
from headrace.gateway.access.budget import RequestHeld
from headrace.gateway.cache.control import NEITHER, Question
from headrace.gateway.cache.replayed_stream import RecordedPrepared
from headrace.gateway.cache.reuse import AnswerReuse
from headrace.gateway.generation.answer_encoder import AnswerEncoder, DirectChunkWriter, EventRecorder
from headrace.gateway.generation.answer_memory import AnswerMemory
from headrace.gateway.generation.outcome import DEADLINE_PASSED, raise_if_failed, record_end
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.generation.resumable import ResumableStream
from headrace.gateway.generation.service import Service
from headrace.gateway.generation.side_requests import SideRequests
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import SseStream
from headrace.gateway.ledger.record import prompt_json
from headrace.gateway.sessions.fitting import ContextFitter, Fitted
from headrace.gateway.sessions.window import ContextFitting
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PrincipalFacts
from headrace.gateway.upstream.output_events import NO_USAGE, OutputEvent, added
from headrace.gateway.upstream.seam import EventStream, Prepared
from headrace.policy.admission.joining import Joining
from headrace.policy.admission.ladder import AdmissionStep
from headrace.policy.limits.price import FREE, Price

DEADLINE_GRACE_S = 0.5
"""The engine ends a request at its deadline. When it has not done so after this many more seconds, the gateway ends the request."""


class Generation:
    """One admitted request of a known model.

    client_params         as the client gave them; the upstream adds the model's defaults
    memory                what the answer takes of `held`, charged from `prepare` on
    resumable             the stream as its client may continue it, or continues one
    fitted                how `prepare` shortened the conversation; None: it did not
    preferred_replica     see `GenerationRequest`; set before `prepare`
    recorders             get the events of the answer
    before_end            awaited once with the replica's name when all events of the answer are there, before its last bytes are
                          sent; where it raises, the answer ends in that error and is not kept for a retry
    reuse                 the answer as it may be given again, or is
    """

    def __init__(self, service: Service, exchange: Exchange, held: RequestHeld, parsed: ParsedRequest) -> None:
        """held: the memory that this request takes is charged to it.

        Raises: ModelNotFound or InvalidRequest, for everything that can be refused without asking the upstream.
        """
        self.service = service
        self.exchange = exchange
        self.held = held
        self.parsed = parsed
        self.model = service.models.usable_by(exchange.principal).only(parsed.model)
        exchange.use(self.model.users)
        record = exchange.record
        record.model, record.stream, record.n = self.model.name, parsed.is_streaming, parsed.sampling.get("n")
        record.version = self.model.upstream.fingerprint
        if exchange.principal.logs_prompts:
            prompt = parsed.prompt
            exchange.logged_prompt = prompt_json(prompt.messages if isinstance(prompt, Conversation) else prompt.prompts)
        self.client_params = SamplingParams(**parsed.sampling).checked()
        self.memory = AnswerMemory(held, parsed, self.client_params)
        self.resumable = ResumableStream(service, exchange, has_logprobs=self.client_params.logprobs is not None)
        self.fitted: Fitted | None = None
        self._side_usage = NO_USAGE
        self.preferred_replica = ""
        self._joining: Joining | None = None
        self.before_end: Callable[[str | None], Awaitable[None]] | None = None
        self.reuse = AnswerReuse(service, exchange, held.answers)
        self.recorders: list[EventRecorder] = []
        self.admission = service.limiter.admission(exchange.request_id)

    async def prepare(self) -> Prepared:
        """Raises what `Upstream.prepare`, `ResumableStream.find`, `AnswerReuse.find`, `Admission.reserve` and `AnswerMemory.reserve`
        raise, and ModelBusy.
        """
        parsed, record = self.parsed, self.exchange.record
        earlier = await self.resumable.find(is_streaming=parsed.is_streaming)
        if (recorded := await self.reuse.find(self._question(), parsed.cache_salt, version=self._version)) is not None:
            self._give_again(recorded)
            return recorded
        if earlier is None:
            self._admit()
        request = GenerationRequest(
            request_id=self.exchange.request_id,
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            grammar=parsed.grammar,
            deadline_at=self._deadline_at(),
            has_priority=parsed.has_priority,
            earlier=earlier,
            preferred_replica=self.preferred_replica,
            joining=self._joining,
        )
        if parsed.grammar is not None:
            self.held.prompts.add(parsed.grammar.num_bytes)
        prepared = await self._prepared(request)
        self.exchange.ignored += prepared.ignored
        self.resumable.open_log(prepared, is_streaming=parsed.is_streaming)
        record.seed = prepared.seed
        if self._side_usage is NO_USAGE:  # else the record has the tokens of what ran already
            record.prompt_tokens = prepared.prompt_tokens
        await self.admission.reserve(self.price, prepared)
        self.memory.reserve(prepared)
        return prepared

    @property
    def price(self) -> Price:
        """The tokens' price of the model that answers."""
        return self.service.config.prices.get(self.model.name, FREE)

    @property
    def shown_model(self) -> str:
        """The answering model's name for the answer: as the client wrote it, unless another model than that answers."""
        asked = self.parsed.model
        return asked if asked is not None and asked in self.model.names else self.model.name

    def _admit(self) -> None:
        """Choose the model that answers while the one that was asked for is busy. Raises ModelBusy."""
        service, exchange, asked = self.service, self.exchange, self.model
        models = service.models.usable_by(exchange.principal)
        try:
            turn = service.open_requests.turn_of(exchange.principal.tenant)
            self.model, step = admitted_model(asked, models, exchange.principal, self.parsed.priority, service.config.admission, turn)
        except ModelBusy:
            exchange.more_headers = (*exchange.more_headers, *headers_of(asked, AdmissionStep.REFUSED))
            raise
        exchange.more_headers = (*exchange.more_headers, *headers_of(self.model, step))
        if self.model is not asked:
            exchange.use(self.model.users)
            exchange.record.model = self.model.name
            self.resumable.turn_off()
            self.reuse.turn_off_cache()
        self._joining = self.model.joining.join(self.parsed.priority)
        exchange.join(self._joining)

    def _give_again(self, recorded: RecordedPrepared) -> None:
        """The answer is there already; a smaller model may have computed it."""
        exchange = self.exchange
        with suppress(ModelNotFound):
            self.model = self.service.models.only(recorded.answer.model)
        exchange.record.model, exchange.record.seed = self.model.name, recorded.seed
        exchange.ignored += recorded.ignored
        exchange.more_headers = (*exchange.more_headers, *headers_of(self.model, AdmissionStep.CACHED_ANSWER))

    async def _prepared(self, request: GenerationRequest) -> Prepared:
        """Raises what `Upstream.prepare` raises."""
        upstream, fitting, tier = self.model.upstream, self.parsed.fitting, self.exchange.principal.tier
        if fitting is ContextFitting.REFUSE:
            return await upstream.prepare(request, self._principal())
        side = SideRequests(self.admission, self.price, self.exchange)
        fitter = ContextFitter(
            upstream,
            self._principal(),
            fitting,
            self.parsed.history,
            max_context_tokens=tier.max_context_tokens,
            open_stream=side.stream,
        )
        prepared, self.fitted = await fitter.prepared(request)
        self._side_usage = side.usage
        if self.fitted is not None:
            self.exchange.add_header("x-headrace-context", f"{fitting}; dropped={self.fitted.num_dropped}")
        elif prepared.prompt_tokens is None:  # only the server that answers can count them
            self.exchange.ignored.append("context_fitting")
        return prepared

    async def answer(self, encoder: AnswerEncoder, prepared: Prepared) -> None:
        """Start the event stream, and write all its events as the answer."""
        self._raise_if_ended()
        await self.resumable.claim()
        deadline_timer = self._start_deadline_timer()
        stream = prepared.stream()
        if (recorder := self.reuse.recorder(prepared, self.model.name)) is not None:
            self.recorders.append(recorder)
        progress = RequestProgress(
            stream,
            num_sequences=prepared.num_sequences,
            arrived_at=self.exchange.arrived_at,
            instruments=partial(self.service.metrics.replica, self.model.name),
        )
        if self.exchange.record.cache_tier is None:
            self.admission.follow(stream.usage)
        try:
            with self.resumable.sending(stream):
                self.exchange.on_ended(self.reuse.cancels(stream.cancel))
                if self.parsed.is_streaming:
                    await self._stream(encoder, stream, progress)
                else:
                    await self._whole(encoder, stream, progress)
        finally:
            stream.listen(None)  # nothing is written any more, and the stream and its listener are in no cycle
            if deadline_timer is not None:
                deadline_timer.cancel()
            if self.reuse.outlives_client:
                await self._read_to_end(stream, progress)
            await stream.close()
            self._close(stream, progress)

    def _question(self) -> Question:
        parsed = self.parsed
        return Question(
            model=self.model.name,
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            grammar=parsed.grammar,
            control=parsed.cache if parsed.fitting is ContextFitting.REFUSE else NEITHER,
        )

    def _version(self) -> str:
        """What an answer depends on beside the question: the model's version, and the caller's limits as far as they bound the output."""
        ceiling = self.admission.ceiling(self.price).deciding(has_max_tokens=self.parsed.sampling.get("max_tokens") is not None)
        return f"{self.model.upstream.version}/{ceiling}"

    def _principal(self) -> PrincipalFacts:
        principal = self.exchange.principal
        salt = hashlib.blake2b(principal.tenant_key.encode(), digest_size=16, key=self.service.salt_key, person=b"headrace-salt")
        salt.update(b"\0" + self.parsed.cache_salt.encode())
        return PrincipalFacts(
            tenant=principal.tenant,
            weight=principal.weight,
            priority=self.parsed.priority,
            tier=principal.tier.terms(principal.tier_name),
            salt=salt.digest(),
            ceiling=self.admission.ceiling(self.price),
        )

    def _deadline_at(self) -> float | None:
        """On the service's clock; None: no deadline. Raises DeadlineBeforeStart when it has passed."""
        request_s = self.service.config.timeouts.request_s
        if request_s is None:
            return None
        deadline_at = self.exchange.arrived_at + request_s
        if deadline_at <= self.service.clock():
            raise DeadlineBeforeStart(f"The request's deadline of {request_s:g} s passed before it began.")
        return deadline_at

    def _start_deadline_timer(self) -> asyncio.TimerHandle | None:
        """Timer that ends the request where the engine does not, because its loop hangs. None: no deadline."""
        deadline_at = self._deadline_at()
        if deadline_at is None:
            return None
        remaining_s = deadline_at - self.service.clock()
        return asyncio.get_running_loop().call_later(remaining_s + DEADLINE_GRACE_S, self.exchange.end, DeadlineExceeded(DEADLINE_PASSED))

    async def _whole(self, encoder: AnswerEncoder, stream: EventStream, progress: RequestProgress) -> None:
        while events := await self._events(stream, progress):
            encoder.add(events)
            self.memory.collect(events)
        await self._before_end(stream)
        pieces = encoder.encode_body(stream.usage())
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

    async def _stream(self, encoder: AnswerEncoder, stream: EventStream, progress: RequestProgress) -> None:
        """Write a stream. Response headers are held back until the first event, so that a refusal keeps its own status; at most for
        `sse_ping_s`."""
        first: list[OutputEvent] | None = None
        if not self.resumable.is_continued:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.service.config.timeouts.sse_ping_s):
                    first = await self._events(stream, progress)
        logprob_bytes = self.memory.unread_logprob_bytes
        async with self.service.watch.open(self.exchange, lambda: stream.unread_bytes, logprob_bytes=logprob_bytes) as sse:
            await self.resumable.replay(encoder, stream, progress, sse, record=self._record)
            events = first if first is not None else await self._events(stream, progress)
            if self.memory.is_inline(()):
                stream.listen(DirectChunkWriter(encoder, progress, sse, self.service.clock, self.recorders))
            while events:
                await self._write(encoder, events, sse)
                events = await self._events(stream, progress)
            stream.listen(None)
            await self._before_end(stream)
            await sse.end(encoder.encode_end(stream.usage()))

    async def _write(self, encoder: AnswerEncoder, events: Sequence[OutputEvent], sse: SseStream) -> None:
        if self.memory.is_inline(events):
            if made := b"".join(encoder.encode_events(events)):
                await sse.write(made)
        else:
            await sse.write_slices(self._slices(encoder.encode_events(events)), num_bytes=sum([event.num_bytes for event in events]))

    async def _events(self, stream: EventStream, progress: RequestProgress) -> list[OutputEvent]:
        """The next events; empty once every sequence has finished. Raises the request's error if it ended otherwise."""
        self._raise_if_ended()
        events = await stream.events()
        self._record(events)
        self._raise_if_ended()
        progress.record(events, self.service.clock())
        for event in events:
            if event.finish is not None:
                raise_if_failed(event.finish, event.error, self.exchange.record)
        if not events and len(progress.finish_reasons) < progress.num_sequences:
            raise Unavailable("The engine ended this request before it was complete; it can be sent again.")
        return events

    async def _read_to_end(self, stream: EventStream, progress: RequestProgress) -> None:
        """Record the rest of an answer whose client has left: it will come again with the same Idempotency-Key."""
        with suppress(HeadraceError):
            while events := await stream.events():
                progress.record(events, self.service.clock())
                self._record(events)
            if self.reuse.is_whole:
                await self._before_end(stream)

    async def _before_end(self, stream: EventStream) -> None:
        """Raises what `before_end` raises."""
        before_end, self.before_end = self.before_end, None
        if before_end is None:
            return
        try:
            await before_end(stream.replica(0))
        except BaseException:
            self.reuse.free_key()
            raise

    def _record(self, events: Sequence[OutputEvent]) -> None:
        for recorder in self.recorders:
            recorder.add(events)

    def _raise_if_ended(self) -> None:
        if self.exchange.end_reason is not None:
            raise self.exchange.end_reason

    def _close(self, stream: EventStream, progress: RequestProgress) -> None:
        """Write usage, times and finish reasons to the request's record, and observe the metrics. Runs once per stream."""
        record, own_usage = self.exchange.record, stream.usage()
        has_run = progress.ttft_s is not None or bool(progress.finish_reasons) or self.exchange.end_reason is not None
        has_run &= record.cache_tier is None
        usage = own_usage if self._side_usage is NO_USAGE else added(self._side_usage, own_usage if has_run else NO_USAGE)
        record_end(record, stream, progress, usage)
        if stream.num_resumes:
            self.service.metrics.sequences_resumed.labels(self.model.name, record.replica or "").inc(stream.num_resumes)
        self.admission.count(own_usage if has_run else None)  # what no engine took costs nothing
        progress.close(self.service.clock(), n=self.client_params.n)
        self.reuse.keep(own_usage)

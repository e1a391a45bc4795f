"""One admitted request, from what its surface asks for to the last byte of its answer.

    ParsedRequest -> Upstream.prepare -> limits -> events -> chunks or one answer -> close

A surface (`surfaces.chat`, `surfaces.completions`) parses the body into a `ParsedRequest`, makes a `Generation` of it, awaits `prepare`,
then `answer` with the `AnswerEncoder` that turns events into its own JSON. This runs in the request's own task, except for
`DirectChunkWriter`, which the wire connection's delivery task calls while the request's task waits. When the answer ends early
(`Exchange.end`), the event stream is cancelled; the task then finds it ended and unwinds. Once an event stream exists, `Generation._close`
runs once, however the request ends.

A chunk is one server-sent event of an answer. A page is up to 64 tokens whose log-probabilities are encoded together. A piece is what an
encoder yields at a time, a page's JSON at most. A slice is the pieces of one turn of `encoding.EncodingTurns`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from headrace.core.clock import Clock
from headrace.core.errors import (
    DeadlineBeforeStart,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    SequenceFailed,
    Unavailable,
)
from headrace.core.finish import FinishReason
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.request import PriorityClass
from headrace.core.sampling import SamplingParams
from headrace.gateway.access.admission import ModelBusy, admitted_model, headers_of
from headrace.gateway.access.budget import RequestHeld
from headrace.gateway.cache.control import NEITHER, NO_WISH, CacheControl, Question
from headrace.gateway.cache.replayed_stream import RecordedPrepared
from headrace.gateway.cache.reuse import AnswerReuse
from headrace.gateway.generation.logprob_limits import (
    MAX_INLINE_LOGPROBS,
    OUTPUT_LOGPROB_BYTES,
    check_output_logprobs,
    encoded_prompt_logprob_bytes,
    first_answer_bytes,
    num_prompt_logprobs,
    prompt_logprob_bytes,
    unread_logprob_bytes,
)
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.generation.resumable import ResumableStream
from headrace.gateway.generation.service import Service
from headrace.gateway.generation.side_requests import SideRequests
from headrace.gateway.http.exchange import PIECE_BYTES, Exchange
from headrace.gateway.http.sse import SseStream
from headrace.gateway.ledger.record import prompt_json
from headrace.gateway.sessions.fitting import ContextFitter, Fitted
from headrace.gateway.sessions.history import History
from headrace.gateway.sessions.window import ContextFitting
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts, RequestedGrammar
from headrace.gateway.upstream.output_events import NO_USAGE, OutputEvent, TokenUsage, added
from headrace.gateway.upstream.seam import EventStream, Prepared
from headrace.observe.request_log import MAX_DETAIL_CHARS
from headrace.policy.admission.joining import Joining
from headrace.policy.admission.ladder import AdmissionStep
from headrace.policy.limits.price import FREE, Price

DEADLINE_PASSED = "The request's deadline passed before it was complete."

PROMPT_TOKEN_BYTES = 36
"""Memory of one prompt token: a reference in a tuple, and the integer object."""

HOLD_STEP_BYTES = 16 << 10
"""An answer that is not streamed asks the memory budget each time it has grown by this many bytes."""

DEADLINE_GRACE_S = 0.5
"""The engine ends a request at its deadline. When it has not done so after this many more seconds, the gateway ends the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One generating request, the same for every surface.

    model        name or alias; None: the only served model
    sampling     the parameters the client gave, by the names of `SamplingParams`
    grammar      what the answer must match; None: any text
    has_priority  the client named a priority class
    cache_salt   the client's own part of the salt
    cache        what the client wants of the response cache
    logprobs_field  name of the field that asked for prompt log-probabilities, for refusals
    num_shown    choices that show the prompt's log-probabilities
    num_kept_encodings  JSON forms of these that stay in memory until the answer is written
    history      the messages of `prompt`, a conversation's; fitting  what is done where they do not fit the context
    """

    model: str | None
    prompt: Conversation | PlainPrompts
    sampling: Mapping[str, Any]
    is_streaming: bool
    priority: PriorityClass
    grammar: RequestedGrammar | None = None
    has_priority: bool = False
    cache_salt: str = ""
    cache: CacheControl = NO_WISH
    logprobs_field: str = "prompt_logprobs"
    num_shown: int = 1
    num_kept_encodings: int = 0
    history: History = field(default_factory=History)
    fitting: ContextFitting = ContextFitting.REFUSE


class AnswerEncoder(Protocol):
    """Turns one request's events into response bytes.

    Streamed: `encode_events`, then `encode_end`. Otherwise: `add` for all events, then `encode_body`.
    """

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        """Server-sent events of `events`, in pieces. Yields nothing if the events have no visible content.

        Each piece is encoded on demand, in less than a millisecond; a piece may be empty, so that long work can pause. Content shared by
        several choices is yielded as the same object, so do not join large answers."""
        ...

    def encode_end(self, usage: TokenUsage) -> bytes:
        """The end of a stream: usage if the request asked for it, then [DONE]."""
        ...

    def add(self, events: Sequence[OutputEvent]) -> None: ...

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        """The whole answer, in pieces as in `encode_events`."""
        ...


class EventRecorder(Protocol):
    """Gets every event of an answer once, whether its client gets it or not."""

    def add(self, events: Sequence[OutputEvent]) -> None: ...


class DirectChunkWriter:
    """An `EventListener` that writes chunks at once, while the consumer task (`Generation._stream`) waits and the socket has room."""

    __slots__ = ("_clock", "_encoder", "_progress", "_recorders", "_sse")

    def __init__(
        self, encoder: AnswerEncoder, progress: RequestProgress, sse: SseStream, clock: Clock, recorders: Sequence[EventRecorder]
    ) -> None:
        self._encoder, self._progress, self._sse, self._clock, self._recorders = encoder, progress, sse, clock, recorders

    @property
    def has_room(self) -> bool:
        return self._sse.has_room

    def take(self, events: Sequence[OutputEvent]) -> None:
        now = self._clock()
        self._progress.record(events, now)
        for recorder in self._recorders:
            recorder.add(events)
        if made := b"".join(self._encoder.encode_events(events)):
            self._sse.write_now(made, now)


class Generation:
    """One admitted request of a known model.

    client_params         as the client gave them; the upstream adds the model's defaults
    num_prompt_logprobs   log-probabilities of the prompt that the answer shows, 0 before `prepare`
    unread_logprob_bytes  bytes of log-probabilities that may wait for a streaming client beyond `max_pending_bytes`
    first_bytes           charge for a collected answer before it begins; 0 for a stream
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
        self.num_prompt_logprobs = 0
        self.unread_logprob_bytes = 0
        self.first_bytes = 0
        self.resumable = ResumableStream(service, exchange, has_logprobs=self.client_params.logprobs is not None)
        self.fitted: Fitted | None = None
        self._side_usage = NO_USAGE
        self.preferred_replica = ""
        self._joining: Joining | None = None
        self.before_end: Callable[[str | None], Awaitable[None]] | None = None
        self.reuse = AnswerReuse(service, exchange, held.answers)
        self.recorders: list[EventRecorder] = []
        self._precharged_json_bytes = 0
        self.admission = service.limiter.admission(exchange.request_id)

    async def prepare(self) -> Prepared:
        """Raises what `Upstream.prepare`, `ResumableStream.find`, `AnswerReuse.find` and `Admission.reserve` raise, ModelBusy, and
        RequestTooLarge for more
        log-probabilities than an answer may hold.
        """
        parsed, params, record = self.parsed, self.client_params, self.exchange.record
        earlier = await self.resumable.find(is_streaming=parsed.is_streaming)
        if (recorded := await self.reuse.find(self._question(), parsed.cache_salt)) is not None:
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
        self.num_prompt_logprobs = num_prompt_logprobs(
            parsed.logprobs_field, params.prompt_logprobs, num_tokens=prepared.prompt_tokens or 0, num_shown=parsed.num_shown
        )
        if not parsed.is_streaming and params.max_tokens is not None:
            check_output_logprobs(params.logprobs, num_tokens=prepared.num_sequences * params.max_tokens)
        piece_bytes = 2 * PIECE_BYTES if self.num_prompt_logprobs else 0  # the encoded slice that is being sent
        self.unread_logprob_bytes = piece_bytes + unread_logprob_bytes(params.logprobs, num_tokens=prepared.max_output_tokens or 0)
        if not parsed.is_streaming:
            self.first_bytes = first_answer_bytes(params.logprobs, num_tokens=prepared.max_output_tokens)
        self.held.prompts.add(PROMPT_TOKEN_BYTES * (prepared.prompt_tokens or 0))
        num_tokens = prepared.prompt_tokens or 0
        column_bytes = prompt_logprob_bytes(params.prompt_logprobs, num_tokens=num_tokens)
        self._precharged_json_bytes = encoded_prompt_logprob_bytes(
            params.prompt_logprobs, num_tokens=num_tokens, num_encodings=parsed.num_kept_encodings
        )
        self.held.answers.add(column_bytes + self._precharged_json_bytes + piece_bytes + self.first_bytes)
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

    def hold_json(self, num_bytes: int) -> None:
        """Count JSON of prompt log-probabilities that the answer keeps. Bytes beyond those charged beforehand are charged now.

        Raises RequestTooLarge or Overloaded.
        """
        self._precharged_json_bytes -= num_bytes
        if self._precharged_json_bytes < 0:
            self.held.answers.add(-self._precharged_json_bytes)
            self._precharged_json_bytes = 0

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
            if deadline_timer is not None:
                deadline_timer.cancel()
            if self.reuse.outlives_client:
                await self._read_to_end(stream, progress)
            await stream.close()
            self._close(stream, progress)

    def _question(self) -> Question:
        parsed, model = self.parsed, self.model
        ceiling = self.admission.ceiling(self.price).deciding(has_max_tokens=parsed.sampling.get("max_tokens") is not None)
        return Question(
            model=model.name,
            version=f"{model.upstream.version}/{ceiling}",
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            grammar=parsed.grammar,
            control=parsed.cache if parsed.fitting is ContextFitting.REFUSE else NEITHER,
        )

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
        num_tokens, uncharged_bytes = 0, -self.first_bytes  # negative while the advance charge is not used up
        logprobs_per_token = (self.client_params.logprobs or 0) + 1
        while events := await self._events(stream, progress):
            encoder.add(events)
            num_new = sum([event.num_logprob_tokens for event in events])
            num_tokens += num_new
            check_output_logprobs(self.client_params.logprobs, num_tokens=num_tokens)
            uncharged_bytes += sum([event.text_bytes for event in events]) + num_new * logprobs_per_token * OUTPUT_LOGPROB_BYTES
            if uncharged_bytes >= HOLD_STEP_BYTES:
                self.held.answers.add(uncharged_bytes)
                uncharged_bytes = 0
        await self._before_end(stream)
        pieces = encoder.encode_body(stream.usage())
        if self.num_prompt_logprobs + num_tokens * logprobs_per_token <= MAX_INLINE_LOGPROBS:
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
        async with self.service.watch.open(self.exchange, lambda: stream.unread_bytes, logprob_bytes=self.unread_logprob_bytes) as sse:
            await self.resumable.replay(encoder, stream, progress, sse, record=self._record)
            events = first if first is not None else await self._events(stream, progress)
            if self.num_prompt_logprobs <= MAX_INLINE_LOGPROBS:
                stream.listen(DirectChunkWriter(encoder, progress, sse, self.service.clock, self.recorders))
            while events:
                await self._write(encoder, events, sse)
                events = await self._events(stream, progress)
            stream.listen(None)
            await self._before_end(stream)
            await sse.end(encoder.encode_end(stream.usage()))

    async def _write(self, encoder: AnswerEncoder, events: Sequence[OutputEvent], sse: SseStream) -> None:
        logprobs_per_token = (self.client_params.logprobs or 0) + 1
        if self.num_prompt_logprobs + sum([event.num_logprob_tokens for event in events]) * logprobs_per_token <= MAX_INLINE_LOGPROBS:
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
                _raise_if_failed(event.finish, event.error, self.exchange)
        if not events and len(progress.finish_reasons) < progress.num_sequences:
            raise Unavailable("The engine ended this request before it was complete; it can be sent again.")
        return events

    async def _read_to_end(self, stream: EventStream, progress: RequestProgress) -> None:
        """Record the rest of an answer whose client has left: it will come again with the same Idempotency-Key."""
        stream.listen(None)
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
        record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        record.completion_tokens = usage.charged.completion_tokens  # earlier ones are in the line of the request that produced them
        record.ttft_s, record.tpot_s = progress.ttft_s, progress.tpot_s
        record.finish_reasons = progress.finish_reasons or None
        record.queue_time_s = stream.queue_time_s(0)
        if (stages := stream.stages(0)) is not None:
            record.prefill_s, record.decode_s = stages.prefill, stages.decode
            record.preempted_s, record.stalled_s = stages.preempted, stages.stalled
        record.replica = stream.replica(0) or record.replica
        if stream.num_resumes:
            record.num_resumes = stream.num_resumes
            self.service.metrics.sequences_resumed.labels(self.model.name, record.replica or "").inc(stream.num_resumes)
        self.admission.count(own_usage if has_run else None)  # what no engine took costs nothing
        progress.close(self.service.clock(), n=self.client_params.n)
        self.reuse.keep(own_usage)


def _raise_if_failed(finish: FinishReason, detail: str | None, exchange: Exchange) -> None:
    if finish.is_answer:
        return
    if finish is FinishReason.DEADLINE:
        raise DeadlineExceeded(DEADLINE_PASSED)
    if finish is FinishReason.CANCELLED:
        raise Unavailable("The engine cancelled this request; it can be sent again.")
    exchange.record.detail = detail and detail[:MAX_DETAIL_CHARS]  # the engine's message is for the operator
    if detail is not None and detail.startswith(CANNOT_CONTINUE):  # sending it again would end the same way
        reason = detail.removeprefix(CANNOT_CONTINUE)[:MAX_DETAIL_CHARS]
        raise InvalidRequest("grammar", "one whose output can be continued within its limits", remedy=f"This output ended: {reason}")
    raise SequenceFailed("The engine could not continue this request. Other requests are not affected; it can be sent again.")
